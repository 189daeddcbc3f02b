"""The commands of ``hpu-duo eval``."""
