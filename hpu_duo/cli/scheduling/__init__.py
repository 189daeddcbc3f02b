"""``hpu-duo train-ranker``."""
