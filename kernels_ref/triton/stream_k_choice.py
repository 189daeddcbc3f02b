"""When the unique part runs as Stream-K: by shape alone, so that a captured step holds one choice."""

from __future__ import annotations

from kernels_ref.triton.launch import DeviceLimits

WORKERS_PER_PROCESSOR = 4
"""Workers that share a streaming multiprocessor and hide each other's beginnings and ends."""

LEAST_ITERATIONS = 4
"""Blocks that a worker should have, on average, before the map is worth its launch."""


def num_workers(limits: DeviceLimits) -> int:
    """Equal ranges into which the work of a step is cut."""
    return WORKERS_PER_PROCESSOR * limits.num_processors


def choose(num_rows: int, num_blocks: int, num_heads: int, limits: DeviceLimits) -> bool:
    """Whether the unique part of this shape runs as Stream-K, rather than cut over the slice.

    It does when several rows may own the slice and every worker gets ``LEAST_ITERATIONS`` blocks or more.
    With one row, ranges of the slice are as equal, and are read in order without a list. With several,
    ranges of blocks that belong to the shared part, to nobody, or to a bucket's padding leave their
    programs idle, and every change of owner costs a triple; ranges of the *owned* blocks do neither. With
    less work than that, building the list is not worth its launch.

    Args:
        num_rows, num_blocks: of the bucket (N, NU).
        num_heads: key/value heads that read the slice.
    """
    return num_rows > 1 and num_blocks * num_heads >= LEAST_ITERATIONS * num_workers(limits)
