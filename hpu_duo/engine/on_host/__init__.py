"""Blocks of running requests in host memory, and attention to them there."""
