"""Blocks that several rows read, or a prompt row.

The function here runs inside an operator: it reads the plan, and returns the partial of all queries, empty
where a query takes no part. Blocks with the same readers are one product, of the tokens of all these rows and
the slots of all these blocks, without a mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bias_builders import leading_visible
from kernels_ref.partial import Partial, empty, merge
from kernels_ref.sdpa.flash import flash
from kernels_ref.x86 import attention as tiled

_Ints = npt.NDArray[np.int32] | npt.NDArray[np.int64]


def shared_blocks(
    q_QKGD: torch.Tensor,
    k_XKBD: torch.Tensor,
    v_XKBD: torch.Tensor,
    row_start: torch.Tensor,
    row_num_new: torch.Tensor,
    row_query_start: torch.Tensor,
    shared_block: torch.Tensor,
    shared_start: torch.Tensor,
    shared_reads: torch.Tensor,
    context_blocks: int,
) -> Partial:
    """Every row over the gathered blocks that it sees, ``context_blocks`` at a time."""
    # All tokens of a row see the same: what is shared was there before the step.
    visible_RX = leading_visible(shared_start, row_start[:, None], k_XKBD.shape[2]) * shared_reads[:-1]
    total = empty(q_QKGD)
    tokens = TokenPlaces(row_query_start.numpy(), row_num_new.numpy())
    for readers in readers_of(visible_RX.numpy() * (row_num_new.numpy() > 0)[:, None]):
        place = tokens.of(readers.rows)
        q, seen = _taken(q_QKGD, place), Partial(*(_taken(x, place) for x in total))
        block = shared_block[torch.from_numpy(readers.blocks)]
        for part in block.split(context_blocks):
            # What one part has gathered is gone before the next one gathers.
            k, v = (_slots(x, part, readers.num_slots) for x in (k_XKBD, v_XKBD))
            if tiled.fits(q, k):
                tiled.attend(seen, q, k, v)
            else:
                for whole, merged in zip(seen, merge(seen, flash(q, k, v))):
                    whole.copy_(merged)
            del k, v
        if isinstance(place, torch.Tensor):
            for whole, one in zip(total, seen):
                whole.index_copy_(0, place, one)
    return total


class Readers(NamedTuple):
    """Rows that see the same leading slots of some blocks.

    Attributes:
        rows, blocks: ascending, the latter as places in the list of shared blocks.
        num_slots: that they see of each block.
    """

    rows: tuple[int, ...]
    blocks: npt.NDArray[np.int64]
    num_slots: int


def readers_of(visible_RX: _Ints) -> Iterator[Readers]:
    """Blocks by who sees how much of them; every pair of a row and a block that it sees comes once."""
    if not visible_RX.size:
        return
    # Neighbours mostly have the same readers, so there are few runs, however many blocks there are.
    is_first = np.ones(visible_RX.shape[1], bool)
    is_first[1:] = (visible_RX[:, 1:] != visible_RX[:, :-1]).any(axis=0)
    bounds = [*np.flatnonzero(is_first).tolist(), visible_RX.shape[1]]
    found: dict[tuple[int, tuple[int, ...]], list[npt.NDArray[np.int64]]] = {}
    for begin, end in itertools.pairwise(bounds):
        column = visible_RX[:, begin]
        for num_slots in set(column[column > 0].tolist()):
            rows = tuple(np.flatnonzero(column == num_slots).tolist())
            found.setdefault((num_slots, rows), []).append(np.arange(begin, end))
    for (num_slots, rows), runs in found.items():
        yield Readers(rows, np.concatenate(runs), num_slots)


class TokenPlaces:
    """Places of the tokens of rows in a step."""

    def __init__(self, query_start: _Ints, num_new: _Ints) -> None:
        self._begin, self._end = query_start, query_start + num_new

    def of(self, rows: Sequence[int]) -> slice | torch.Tensor:
        """Places of the tokens of some rows: a slice if they lie side by side."""
        begins, ends = ([int(x[row]) for row in rows] for x in (self._begin, self._end))
        if begins[1:] == ends[:-1]:
            return slice(begins[0], ends[-1])
        return torch.from_numpy(np.concatenate([np.arange(*pair) for pair in zip(begins, ends)]))


def _taken(tensor: torch.Tensor, place: slice | torch.Tensor) -> torch.Tensor:
    """Some tokens: a view for a slice, else a copy."""
    return tensor[place] if isinstance(place, slice) else tensor.index_select(0, place)


def _slots(x_XKBD: torch.Tensor, block: torch.Tensor, num_slots: int) -> torch.Tensor:
    """The leading slots of some blocks side by side, ``[T, K, D]``."""
    return x_XKBD.index_select(0, block)[:, :, :num_slots].transpose(1, 2).flatten(0, 1)
