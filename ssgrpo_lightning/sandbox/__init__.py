"""Running untrusted code: isolation, limits, and tests whose answers never go in."""
