"""Pools of reference-counted KV blocks and of dense ring rows, ids without tensors, and copies of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, takewhile
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt


class BlockMove(NamedTuple):
    """A used block that got another, lower id, with all of its references.

    Attributes:
        src, dst: the id before and now. The block that was ``dst`` is ``src`` now.
        is_exchange: whether that was idle, so that contents are swapped.
    """

    src: int
    dst: int
    is_exchange: bool


class BlockPool:
    """Allocates block ids ``0 .. num_blocks - 1``, always the lowest free one first.

    Used blocks have low ids, so the slice of the store that a step reads is short while the pool is not full.
    Blocks are reference-counted, and free again without references. A *kept* (cached) block without
    references is *idle* instead, and can be shared again, until it is dropped; ``compact`` moves used blocks
    below idle ones. The store has one block more than the pool, the *null block* ``num_blocks``, the target
    of padded writes, which is never allocated.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be 0 or more, got {num_blocks}")
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._is_held = np.zeros(num_blocks, np.bool_)
        # A heap of free blocks, with stale entries, which are skipped when popped.
        self._free = list(range(num_blocks))
        self._kept: set[int] = set()
        self._num_free, self._num_idle, self._num_shared = num_blocks, 0, 0
        self._may_have_gaps = False

    @property
    def null_block(self) -> int:
        """The id of the block that padding reads and writes."""
        return self.num_blocks

    @property
    def num_free(self) -> int:
        """Number of blocks without references that are not cached."""
        return self._num_free

    @property
    def num_idle(self) -> int:
        """Number of cached blocks without references."""
        return self._num_idle

    @property
    def num_used(self) -> int:
        """Number of blocks with at least one reference."""
        return self.num_blocks - self._num_free - self._num_idle

    @property
    def num_shared(self) -> int:
        """Number of blocks with several references."""
        return self._num_shared

    def num_holders(self, block: int) -> int:
        """Number of references to ``block``; 0 = free or idle."""
        self._check_id(block)
        return self._holders[block]

    def is_idle(self, block: int) -> bool:
        """Whether ``block`` is cached and has no references."""
        self._check_id(block)
        return not self._holders[block] and block in self._kept

    def allocate(self, count: int = 1) -> list[int]:
        """Allocate the ``count`` lowest free blocks, in ascending order, each with one reference.

        Raises:
            ValueError: fewer than ``count`` blocks are free; nothing is allocated then.
        """
        if not 0 <= count <= self._num_free:
            raise ValueError(f"expected {count} free blocks, got {self._num_free} of {self.num_blocks}")
        blocks: list[int] = []
        while len(blocks) < count:
            block = heappop(self._free)
            if not self._holders[block] and block not in self._kept:
                self._holders[block] = 1
                blocks.append(block)
        self._is_held[blocks] = True
        self._num_free -= count
        self._may_have_gaps = True
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block.

        Raises:
            ValueError: a block is free or unknown; the blocks before it have their new reference.
        """
        for block in blocks:
            self._check_taken(block)
            if not self._holders[block]:
                self._num_idle -= 1
                self._is_held[block] = self._may_have_gaps = True
            self._holders[block] += 1
            self._num_shared += self._holders[block] == 2

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one reference from each block; without references a block is free, or idle if it is cached.

        Raises:
            ValueError: a block has no references or is unknown; the blocks before it are released.
        """
        for block in blocks:
            self._check_held(block)
            self._holders[block] -= 1
            self._num_shared -= self._holders[block] == 1
            if self._holders[block]:
                continue
            self._is_held[block] = False
            self._may_have_gaps = True
            if block in self._kept:
                self._num_idle += 1
            else:
                self._add_free(block)

    def keep(self, block: int) -> None:
        """Mark a block in use as cached: without references it will be idle.

        Raises:
            ValueError: it has no references, or is cached already.
        """
        self._check_held(block)
        if block in self._kept:
            raise ValueError(f"block {block} is cached already")
        self._kept.add(block)

    def drop(self, block: int) -> None:
        """Mark a block as not cached; without references it is free.

        Raises:
            ValueError: it is not cached.
        """
        if block not in self._kept:
            raise ValueError(f"block {block} is not cached")
        self._kept.remove(block)
        if not self._holders[block]:
            self._num_idle -= 1
            self._add_free(block)

    def compact(self, most: int) -> list[BlockMove]:
        """Move the highest used blocks to the lowest unused ids, ``most`` of them at most.

        Without a bound, used blocks are the first ``num_used`` ones afterwards.

        Returns:
            The moves; no block is in two of them. The caller renumbers block tables and idle blocks.
        """
        if not self._may_have_gaps:
            return []
        used = self.num_used
        above = np.flatnonzero(self._is_held[used:])[::-1] + used
        self._may_have_gaps = len(above) > 0
        above = above[:most]
        below = np.flatnonzero(~self._is_held[:used])[: len(above)]
        return [self._exchange(src, dst) for src, dst in zip(above.tolist(), below.tolist())]

    def _exchange(self, src: int, dst: int) -> BlockMove:
        is_idle, is_kept = dst in self._kept, src in self._kept
        self._holders[src], self._holders[dst] = self._holders[dst], self._holders[src]
        self._is_held[src], self._is_held[dst] = False, True
        self._kept -= {src, dst}
        self._kept |= {src} if is_idle else set()
        self._kept |= {dst} if is_kept else set()
        if not is_idle:
            heappush(self._free, src)
        return BlockMove(src, dst, is_idle)

    def _add_free(self, block: int) -> None:
        self._num_free += 1
        heappush(self._free, block)

    def _check_id(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is not one of the pool's {self.num_blocks} blocks")

    def _check_held(self, block: int) -> None:
        self._check_id(block)
        if self._holders[block] == 0:
            raise ValueError(f"block {block} is free")

    def _check_taken(self, block: int) -> None:
        self._check_id(block)
        if not self._holders[block] and block not in self._kept:
            raise ValueError(f"block {block} is free")


Owner = TypeVar("Owner")


@dataclass(frozen=True)
class RowMove(Generic[Owner]):
    """A move of ``owner`` from row ``src`` to row ``dst``, whose ring has to be copied."""

    owner: Owner
    src: int
    dst: int


class RowPool(Generic[Owner]):
    """Allocates rows ``0 .. num_rows - 1``, the lowest free one first, one owner each.

    After ``compact`` the ``n`` used rows are exactly ``[0, n)``, so a step over ``n`` requests works on a
    leading slice of the ring store. The store has one row more, the *null row* ``num_rows`` of padding, which
    is never allocated.
    """

    def __init__(self, num_rows: int) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows must be 1 or more, got {num_rows}")
        self.num_rows = num_rows
        self._owners: list[Owner | None] = [None] * num_rows
        self._free = list(range(num_rows))

    @property
    def null_row(self) -> int:
        """The row that padding reads and writes."""
        return self.num_rows

    @property
    def num_free(self) -> int:
        """Number of rows without an owner."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of rows with an owner."""
        return self.num_rows - len(self._free)

    def owner(self, row: int) -> Owner | None:
        """The owner of ``row``; None when it is free."""
        return self._owners[row]

    def acquire(self, owner: Owner) -> int:
        """Allocate the lowest free row to ``owner``.

        Raises:
            ValueError: no row is free.
        """
        if not self._free:
            raise ValueError(f"expected a free row, all {self.num_rows} are in use")
        row = heappop(self._free)
        self._owners[row] = owner
        return row

    def release(self, row: int) -> None:
        """Free ``row``; this may leave a hole until the next ``compact`` or ``acquire``.

        Raises:
            ValueError: the row is free already, or is no row of this pool.
        """
        if not 0 <= row < self.num_rows or self._owners[row] is None:
            raise ValueError(f"row {row} is not a used row of {self.num_rows}")
        self._owners[row] = None
        heappush(self._free, row)

    def compact(self) -> list[RowMove[Owner]]:
        """Move the highest used row into the lowest hole until there is no hole.

        Returns:
            The moves in order of execution; sources are at or above ``num_used``, destinations below it, so
            no move reads what another one wrote.
        """
        used = self.num_used
        if not self._free or self._free[0] == used:
            return []
        holes = (row for row in range(used) if self._owners[row] is None)
        moves = []
        for src in range(self.num_rows - 1, used - 1, -1):
            owner = self._owners[src]
            if owner is None:
                continue
            dst = next(holes)
            self._owners[dst], self._owners[src] = owner, None
            moves.append(RowMove(owner, src, dst))
        self._free = list(range(used, self.num_rows))  # ascending, hence already a heap
        return moves


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


@dataclass(frozen=True)
class HostCopy:
    """Copy block ``src`` of the device onto block ``dst`` of the host."""

    src: int
    dst: int


Copy: TypeAlias = BlockCopy | BlockSwap | RowCopy | HostCopy


@dataclass(frozen=True)
class CopyLists:
    """The net effect of successive copies, as copies with all sources read before any write.

    Attributes:
        blocks, rows: int32 ``[2, n]``: sources, and the destinations below them, which are distinct.
        to_host: the same, from blocks of the device to blocks of the host.
    """

    blocks: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    to_host: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((2, 0), np.int32))

    @classmethod
    def of(cls, copies: Sequence[Copy]) -> CopyLists:
        """Return, for each destination, the unit that had its content before the first copy."""
        if not copies:
            return NO_COPIES
        rows = [copy for copy in copies if isinstance(copy, RowCopy)]
        blocks, to_host = _sources([copy for copy in copies if not isinstance(copy, RowCopy)])
        moved = [(src, dst) for dst, src in to_host.items()]
        return cls(_pairs(blocks), _pairs(_sources(rows)[0]), np.array(moved, np.int32).reshape(-1, 2).T)


def _sources(copies: Sequence[Copy]) -> tuple[dict[int, int], dict[int, int]]:
    """For each destination on the device, and on the host, the unit with its content before all copies."""
    source_of: dict[int, int] = {}
    to_host: dict[int, int] = {}
    for copy in copies:
        if isinstance(copy, BlockSwap):
            one, other = (source_of.get(block, block) for block in (copy.one, copy.other))
            source_of[copy.one], source_of[copy.other] = other, one
        else:
            target = to_host if isinstance(copy, HostCopy) else source_of
            target[copy.dst] = source_of.get(copy.src, copy.src)
    return source_of, to_host


def _pairs(source_of: Mapping[int, int]) -> npt.NDArray[np.int32]:
    pairs = [(src, dst) for dst, src in source_of.items() if src != dst]
    return np.array(pairs, np.int32).reshape(-1, 2).T


NO_COPIES = CopyLists(_pairs({}), _pairs({}))
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
