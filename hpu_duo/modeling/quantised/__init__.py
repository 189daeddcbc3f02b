"""Checkpoints with quantised weights: their encodings, their configurations, and how they are read."""
