"""Leases of the KV stores by requests, and the copies that follow from changes of the leases."""

from __future__ import annotations

from graphs import StepLimits
from hpu_duo.kv.copies import BlockCopy, Copy, RowCopy
from hpu_duo.kv.pool import BlockPool
from hpu_duo.kv.prefix import PrefixCache, PrefixHit
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
        caches_prefixes: keep full blocks for later requests; see ``PrefixCache``.
        uses_rows: whether any head keeps a ring, so that prefixes need snapshots.
        num_snapshots: rows for snapshots, behind the others.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        *,
        uses_blocks: bool = True,
        caches_prefixes: bool = False,
        uses_rows: bool = True,
        num_snapshots: int = 0,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be 1 or more, got {block_size}")
        self.block_size = block_size
        self.uses_blocks = uses_blocks
        self.blocks = BlockPool(num_blocks)
        self.rows: RowPool[Request] = RowPool(num_rows)
        self._copies: list[Copy] = []
        self.prefixes: PrefixCache | None = None
        if caches_prefixes:
            self.prefixes = PrefixCache(
                self.blocks,
                block_size,
                range(num_rows, num_rows + num_snapshots),
                uses_blocks=uses_blocks,
                uses_rows=uses_rows,
                add_copy=lambda copy: self._copies.append(copy),
            )

    @classmethod
    def of(cls, limits: StepLimits) -> KVLeases:
        """Make the pools of an engine."""
        return cls(
            limits.num_blocks,
            limits.block_size,
            limits.max_num_seqs,
            uses_blocks=limits.uses_blocks,
            caches_prefixes=limits.caches_prefixes,
            uses_rows=limits.uses_rows,
            num_snapshots=limits.num_snapshots,
        )

    @property
    def num_available(self) -> int:
        """Blocks that can be leased: free ones, and idle ones of the prefix cache."""
        return self.blocks.num_free + self.blocks.num_idle

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens of one request; 0 where no head needs blocks."""
        return -(-num_tokens // self.block_size) if self.uses_blocks else 0

    def num_blocks_due(self, request: Request, hit: PrefixHit | None = None) -> int:
        """Blocks the request does not hold yet but needs for its known tokens and one more.

        The one more is the token it samples next, unless that is its last one, which is never cached.

        Args:
            hit: what the request will begin with; blocks of it that others hold are not due.
        """
        num_tokens = min(request.num_tokens + 1, request.max_cached_tokens)
        num_held = 0 if hit is None or self.prefixes is None else self.prefixes.num_held(hit)
        return max(0, self.num_blocks_for(num_tokens) - request.num_blocks - num_held)

    def find(self, request: Request) -> PrefixHit | None:
        """Return what the prefix cache has of a request; None without one."""
        return None if self.prefixes is None else self.prefixes.find(request)

    def open(self, request: Request, hit: PrefixHit | None = None) -> int:
        """Lease the lowest free row to the request, and let it begin with a hit of the prefix cache.

        Returns:
            Its tokens that are in the cache now.

        Raises:
            ValueError: no row is free, or the request has a row already.
        """
        if request.row != NO_ROW:
            raise ValueError(f"request {request.request_id!r} already has row {request.row}")
        request.row = self.rows.acquire(request)
        request.num_blocks = 0
        request.reserve_block_table(self.num_blocks_for(request.max_cached_tokens))
        if hit is None or self.prefixes is None:
            return 0
        num_tokens = self.prefixes.take_up(request, hit)
        self._append_blocks(request, self.prefixes.blocks_of(hit))
        return num_tokens

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Lease the blocks the request still lacks to hold its first ``num_tokens`` tokens.

        Returns:
            False, and nothing has changed, if too few blocks are free.
        """
        missing = self.num_blocks_for(num_tokens) - request.num_blocks
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        self._append_blocks(request, self._allocate(missing))
        return True

    def close(self, request: Request) -> None:
        """Give back the row and every block of the request; what the prefix cache keeps stays.

        The numbers in ``block_table`` stay readable until the request is opened again: a step that is
        already on its way may still be looking at them.
        """
        if self.prefixes is not None:
            self.prefixes.release(request)
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
        if self.rows.num_free == 0 or self.num_available < num_private:
            return False
        self.open(child)
        if self.uses_blocks:
            num_shared = num_tokens // self.block_size
            shared = parent.block_table[:num_shared].tolist()
            self.blocks.share(shared)
            private = self._allocate(num_private)
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

    def _allocate(self, count: int) -> list[int]:
        """Lease blocks that are available, for which idle ones go."""
        if self.prefixes is not None and count > self.blocks.num_free:
            self.prefixes.evict(count - self.blocks.num_free)
        return self.blocks.allocate(count)

    def _append_blocks(self, request: Request, blocks: list[int]) -> None:
        end = request.num_blocks + len(blocks)
        request.block_table[request.num_blocks : end] = blocks
        request.num_blocks = end
