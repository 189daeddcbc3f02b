"""Visibility under a rule by position: what can be cut by distance, and the masks of what remains.

Shapes: Q query tokens, N rows of up to M decoded tokens, X blocks, B slots of a block.
"""

from __future__ import annotations

import torch

from bias_builders import Rule, Window
from kernels_ref.index import gather
from kernels_ref.slices import QUERY_STEP

MASK_BYTES = 16
"""Bytes of each pair of a query and a key while a rule is worked out: distances, remainders and booleans."""


def reached_keys(rule: Rule | None, begin: int, end: int, tile: int = QUERY_STEP) -> list[slice]:
    """Places of the new keys that the new queries ``[begin, end)`` may see, by their distance alone.

    Tokens of a row lie side by side, so places that far apart are tokens that far apart. Ascending, not
    empty, up to ``end``. Sinks before the first of them are left out; there is no gap if a rule has sinks.

    Args:
        tile: keys that are kept or left out together.
    """
    if rule is None:
        return [slice(0, end)]
    if isinstance(rule, Window):
        return [slice(max(0, begin - rule.recent + 1), end)]
    found: list[slice] = []
    for first in range(0, end, tile):
        stop = min(first + tile, end)
        is_gap = not rule.reaches(max(0, begin - stop + 1), end - 1 - first)
        if is_gap and not (found and rule.sink):
            continue
        if found and found[-1].stop == first:
            first = found.pop().start
        found.append(slice(first, stop))
    return found


def picked(x: torch.Tensor, places: list[slice]) -> torch.Tensor:
    """Some entries of the first dimension: a view if they lie side by side."""
    return x[places[0]] if len(places) == 1 else torch.cat([x[place] for place in places])


def slot_positions(start_X: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Positions in the slots of blocks that begin at ``start_X``, ``[X, B]``."""
    return start_X[..., None] + torch.arange(num_slots, dtype=start_X.dtype, device=start_X.device)


def shared_visible(
    rule: Rule, position_Q: torch.Tensor, start_X: torch.Tensor, num_slots: int
) -> torch.Tensor:
    """Slots of shared blocks that a rule shows each query, ``[Q, X, B]``; whatever its row has stored."""
    return rule.sees(position_Q[:, None, None], slot_positions(start_X, num_slots)[None])


def whole_visible(
    rule: Rule, end_NM: torch.Tensor, owner: torch.Tensor, start_X: torch.Tensor, num_slots: int
) -> torch.Tensor:
    """Slots of whole unique blocks that a rule shows each token of the row that owns them, ``[X, M, B]``.

    Args:
        end_NM: position behind each token, 0 where there is none.
        owner: row of each block, ``N`` = nobody, whose tokens here are anybody's.
    """
    last = end_NM.shape[0] - 1
    position_XM = gather(end_NM, torch.clamp(owner, max=last)) - 1
    return rule.sees(position_XM[:, :, None], slot_positions(start_X, num_slots)[:, None])


def tails_visible(rule: Rule, end_NM: torch.Tensor, start_NT: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Slots of the tails of rows that a rule shows each of their tokens, ``[N, 1, M, T * B]``."""
    key = slot_positions(start_NT, num_slots).flatten(1)
    return rule.sees((end_NM - 1)[:, None, :, None], key[:, None, None])
