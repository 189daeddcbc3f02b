"""A test of a machine in stages: ``hpu-duo selftest``, for the first contact with a card."""
