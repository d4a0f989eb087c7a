"""What an update costs, in seconds and memory: ours, TRL's, and the least it could be."""
