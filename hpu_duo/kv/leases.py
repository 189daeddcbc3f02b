"""Leases of the KV stores by requests, and the copies that follow from changes of the leases."""

from __future__ import annotations

from hpu_duo.kv.copies import BlockCopy, Copy, RowCopy
from hpu_duo.kv.pool import BlockPool
from hpu_duo.kv.rows import RowPool
from hpu_duo.request import NO_ROW, Request


class KVLeases:
    """Owns both pools; the only writer of a request's ``row``, ``block_table`` and ``num_blocks``.

    Copies are collected in one list, in the order in which the leases changed. Carried out one after the
    other before the next step writes anything, they are right even if a source or a destination has
    been released and leased again meanwhile: the later lease is also filled later.

    Args:
        num_blocks: blocks that can be leased.
        block_size: tokens per block.
        num_rows: ring rows that can be leased.
        uses_blocks: False for a model without retrieval heads: blocks are then neither needed nor counted.
    """

    def __init__(self, num_blocks: int, block_size: int, num_rows: int, *, uses_blocks: bool = True) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be 1 or more, got {block_size}")
        self.block_size = block_size
        self.uses_blocks = uses_blocks
        self.blocks = BlockPool(num_blocks)
        self.rows: RowPool[Request] = RowPool(num_rows)
        self._copies: list[Copy] = []

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens of one request; 0 where no head needs blocks."""
        return -(-num_tokens // self.block_size) if self.uses_blocks else 0

    def num_blocks_due(self, request: Request) -> int:
        """Blocks the request does not hold yet but needs for its known tokens and one more.

        The one more is the token it samples next, unless that is its last one, which is never cached.
        """
        num_tokens = min(request.num_tokens + 1, request.max_cached_tokens)
        return max(0, self.num_blocks_for(num_tokens) - request.num_blocks)

    def open(self, request: Request) -> None:
        """Lease the lowest free row to the request; it holds no block yet.

        Raises:
            ValueError: no row is free, or the request has a row already.
        """
        if request.row != NO_ROW:
            raise ValueError(f"request {request.request_id!r} already has row {request.row}")
        request.row = self.rows.acquire(request)
        request.num_blocks = 0
        request.reserve_block_table(self.num_blocks_for(request.max_cached_tokens))

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Lease the blocks the request still lacks to hold its first ``num_tokens`` tokens.

        Returns:
            False, and nothing has changed, if too few blocks are free.
        """
        missing = self.num_blocks_for(num_tokens) - request.num_blocks
        if missing <= 0:
            return True
        if missing > self.blocks.num_free:
            return False
        self._append_blocks(request, self.blocks.allocate(missing))
        return True

    def close(self, request: Request) -> None:
        """Give back the row and every block of the request.

        The numbers in ``block_table`` stay readable until the request is opened again: a step that is
        already on its way may still be looking at them.
        """
        self.rows.release(request.row)
        self.blocks.release(request.block_table[: request.num_blocks].tolist())
        request.row = NO_ROW
        request.num_blocks = 0

    def fork(self, parent: Request, child: Request, num_tokens: int) -> bool:
        """Open ``child`` with the first ``num_tokens`` tokens of ``parent`` in its cache.

        Blocks that are full at ``num_tokens`` are shared. The next token of the child goes to a block
        of its own, which is leased here and starts as a copy of the parent's where it begins with shared
        tokens. The ring row is copied whole, so the parent must not have cached more than one token
        beyond ``num_tokens`` and the slack of its ring: that token lies where the child writes next.

        Returns:
            False, and nothing has changed, if there is no free row or no free block.
        """
        num_private = 1 if self.uses_blocks else 0
        if self.rows.num_free == 0 or self.blocks.num_free < num_private:
            return False
        self.open(child)
        if self.uses_blocks:
            num_shared = num_tokens // self.block_size
            shared = parent.block_table[:num_shared].tolist()
            self.blocks.share(shared)
            private = self.blocks.allocate(num_private)
            self._append_blocks(child, shared + private)
            if num_tokens % self.block_size:
                self._copies.append(BlockCopy(int(parent.block_table[num_shared]), private[0]))
        self._copies.append(RowCopy(parent.row, child.row))
        return True

    def take_copies(self) -> tuple[Copy, ...]:
        """Make the used rows dense and hand over every copy that is due, in the order to carry them out."""
        for move in self.rows.compact():
            move.owner.row = move.dst
            self._copies.append(RowCopy(move.src, move.dst))
        copies, self._copies = tuple(self._copies), []
        return copies

    def _append_blocks(self, request: Request, blocks: list[int]) -> None:
        end = request.num_blocks + len(blocks)
        request.block_table[request.num_blocks : end] = blocks
        request.num_blocks = end
