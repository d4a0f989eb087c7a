"""Rollouts and curves for people: coloured text for terminals, self-contained HTML for browsers."""
