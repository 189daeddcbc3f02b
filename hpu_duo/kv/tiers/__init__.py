"""Tiers of the prefix cache behind the device: records of blocks and snapshots in host memory."""
