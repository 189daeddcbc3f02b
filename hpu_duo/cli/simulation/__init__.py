"""``hpu-duo simulate``."""
