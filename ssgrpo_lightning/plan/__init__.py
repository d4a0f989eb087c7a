"""What a config would take on hardware that is not here: memory, work, time."""
