"""Copies within the KV stores, executed by the device before a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_SIZE_FACTOR = 4


@dataclass(frozen=True)
class BlockCopy:
    """Copy block ``src`` onto block ``dst``, keys and values, in every layer with retrieval heads."""

    src: int
    dst: int


@dataclass(frozen=True)
class BlockSwap:
    """Swap the contents of two blocks."""

    one: int
    other: int


@dataclass(frozen=True)
class RowCopy:
    """Copy ring row ``src`` onto ring row ``dst``, keys and values, in every layer with streaming heads."""

    src: int
    dst: int


Copy: TypeAlias = BlockCopy | BlockSwap | RowCopy


@dataclass(frozen=True)
class CopyLists:
    """The net effect of successive copies, as copies with all sources read before any write.

    Attributes:
        blocks, rows: int32 ``[2, n]``: sources, and the destinations below them, which are distinct.
    """

    blocks: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]

    @classmethod
    def of(cls, copies: Sequence[Copy]) -> CopyLists:
        """Return, for each destination, the unit that had its content before the first copy."""
        if not copies:
            return NO_COPIES
        rows = [copy for copy in copies if isinstance(copy, RowCopy)]
        return cls(_pairs([copy for copy in copies if not isinstance(copy, RowCopy)]), _pairs(rows))


def _pairs(copies: Sequence[Copy]) -> npt.NDArray[np.int32]:
    source_of: dict[int, int] = {}
    for copy in copies:
        if isinstance(copy, BlockSwap):
            one, other = (source_of.get(block, block) for block in (copy.one, copy.other))
            source_of[copy.one], source_of[copy.other] = other, one
        else:
            source_of[copy.dst] = source_of.get(copy.src, copy.src)
    pairs = [(src, dst) for dst, src in source_of.items() if src != dst]
    return np.array(pairs, np.int32).reshape(-1, 2).T


NO_COPIES = CopyLists(_pairs(()), _pairs(()))
"""The net effect of no copies."""


def copy_sizes(most: int) -> tuple[int, ...]:
    """The padded numbers of copies, up to ``most``: few, because a device compiles each one."""
    return (*takewhile(lambda size: size < most, (_SIZE_FACTOR**power for power in count())), most)


def padded_size(num_copies: int, most: int) -> int:
    """Return the smallest of ``copy_sizes(most)`` that fits; 0 for no copies.

    Raises:
        ValueError: there are more than ``most``.
    """
    if not num_copies:
        return 0
    if num_copies > most:
        raise ValueError(f"expected at most {most} copies of one kind in a step, got {num_copies}")
    return next(size for size in copy_sizes(most) if size >= num_copies)
