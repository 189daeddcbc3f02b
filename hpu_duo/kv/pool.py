"""Counted leases of KV blocks; no tensors, only ids."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush


class BlockPool:
    """Hands out block ids ``0 .. num_blocks - 1``, always the lowest free one first.

    The lowest id first keeps the used part of the block store dense, so that the slice of the store a
    step has to look at stays as short as the pool is full. A block may have several holders; it is
    free again when the last one has released it. The store has one block more than the pool, the
    *trash block* ``num_blocks``, which padded writes go to and which is never handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be 0 or more, got {num_blocks}")
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks))

    @property
    def trash_block(self) -> int:
        """The id of the block that padding points at."""
        return self.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks without a holder."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - len(self._free)

    def num_holders(self, block: int) -> int:
        """Number of holders of ``block``; 0 is free."""
        self._check_id(block)
        return self._holders[block]

    def allocate(self, count: int = 1) -> list[int]:
        """Lease the ``count`` lowest free blocks, in ascending order, each with one holder.

        Raises:
            ValueError: fewer than ``count`` blocks are free; nothing is leased then.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(f"asked for {count} blocks, {len(self._free)} of {self.num_blocks} are free")
        blocks = [heappop(self._free) for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block.

        Raises:
            ValueError: a block is free or unknown; the blocks before it keep their new holder.
        """
        for block in blocks:
            self._check_held(block)
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one holder from each block; a block without holders is free at once.

        Raises:
            ValueError: a block is already free or unknown; the blocks before it are released.
        """
        for block in blocks:
            self._check_held(block)
            self._holders[block] -= 1
            if self._holders[block] == 0:
                heappush(self._free, block)

    def _check_id(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is not one of the pool's {self.num_blocks} blocks")

    def _check_held(self, block: int) -> None:
        self._check_id(block)
        if self._holders[block] == 0:
            raise ValueError(f"block {block} is free: nobody holds it")
