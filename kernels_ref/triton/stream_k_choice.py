"""Choice of Stream-K for the unique part: by shape alone, so that a captured step has one choice."""

from __future__ import annotations

from kernels_ref.triton.launch import DeviceLimits

WORKERS_PER_PROCESSOR = 2
"""Workers per streaming multiprocessor: all are resident, so none starts after others end."""

LEAST_ITERATIONS = 4
"""Fewest blocks per worker, on average, for which the list of work is worth its launch."""

LEAST_ITERATIONS_ALONE = 16
"""The same for one row, whose blocks are mostly contiguous."""


def num_workers(limits: DeviceLimits) -> int:
    """Equal ranges into which the work of a step is cut."""
    return WORKERS_PER_PROCESSOR * limits.num_processors


def choose(
    num_rows: int, num_blocks: int, num_heads: int, limits: DeviceLimits, *, reads_codes: bool = False
) -> bool:
    """Whether the unique part of this shape runs as Stream-K, rather than cut over the slice.

    Ranges of the *slice* are equal only if somebody owns all of it: blocks of the shared part, unowned ones,
    and a bucket's padding leave their programs idle, and every change of owner inside a range costs a triple.
    Ranges of the *owned* blocks avoid both, for a launch that lists them. How much of a slice is owned is
    data, so the rule uses the shape only: with several rows owners alternate, and the list is worth it from
    ``LEAST_ITERATIONS`` blocks for every worker; one row loses by padding only, and needs
    ``LEAST_ITERATIONS_ALONE``. With one row of codes Stream-K takes 1.3 to 1.7 times as long on an H100,
    more than padding costs.

    Args:
        num_rows, num_blocks: of the bucket (N, NU).
        num_heads: key/value heads that read the slice.
        reads_codes: whether keys or values are codes.
    """
    if num_rows == 1 and reads_codes:
        return False
    least = LEAST_ITERATIONS if num_rows > 1 else LEAST_ITERATIONS_ALONE
    return num_blocks * num_heads >= least * num_workers(limits)
