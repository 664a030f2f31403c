"""The host column on a fake clock and a fake device: the scheduler that serves is the one that is simulated."""
