"""Launch of the kernels in which decode rows meet their own rings."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels_ref.triton import launch


class RingLaunch(NamedTuple):
    """Grid, results and sizes of a launch.

    Attributes:
        grid: heads, rows, ranges that each ring is cut into.
        parts: room for the triples of all ranges.
        sizes: arguments behind ``parts``: rows, slots of a range, strides of the queries.
        constants: of the store, the heads and the tiles, by name, and the compiler's options.
    """

    grid: tuple[int, int, int]
    parts: launch.Triple
    sizes: tuple[int, ...]
    constants: dict[str, int | bool]


def plan_rings(q_NKGD: torch.Tensor, k_RKWD: torch.Tensor) -> RingLaunch:
    """Choose tiles and ranges for queries and a store of rings."""
    num_rows, num_heads, group, dim = q_NKGD.shape
    num_slots = k_RKWD.shape[2]
    limits = launch.device_limits(q_NKGD.device)
    chosen = launch.decode(group, dim, k_RKWD.dtype, limits)
    tiles = launch.num_tiles(num_slots, chosen.keys)
    # A split of fewer tiles is over before the merge that it costs has begun.
    splits = launch.num_splits(num_rows * num_heads, max(1, tiles // limits.tiles_of_a_split), limits)
    return RingLaunch(
        (num_heads, num_rows, splits),
        launch.partials(q_NKGD, splits * num_rows),
        (num_rows, launch.num_tiles(tiles, splits) * chosen.keys, *q_NKGD.stride()[:3]),
        {
            **launch.strides(k_RKWD),
            "SLOTS": num_slots,
            **chosen.constants(q_NKGD),
        },
    )
