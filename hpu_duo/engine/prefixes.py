"""The scheduler's policy for cached prefixes: pins, snapshots, and requests that wait for a prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

import numpy as np

from graphs import StepLimits
from hpu_duo.engine.step_plan import StepDraft, StepPlan
from hpu_duo.kv.allocations import KVAllocations
from hpu_duo.kv.prefix import PrefixHit
from hpu_duo.kv.prefix_tree import PrefixNode
from hpu_duo.request import PrefixHold, Request, RequestStatus


class PrefixHolding:
    """Opens holds, which pin prefixes, and releases them when their contexts and requests have ended.

    Each unfinished request alone must fit beside the pinned blocks, so that none waits for a hold to end. A
    request that does not fit is rejected, and so is a hold beside which one would not fit.

    Args:
        allocations: with the prefix cache; without one nothing can be pinned.
        unfinished: requests by id.
    """

    def __init__(self, allocations: KVAllocations, unfinished: Mapping[str, Request]) -> None:
        self._allocations, self._unfinished, self._cache = allocations, unfinished, allocations.prefixes

    def enter(self, request: Request) -> None:
        """Add a reference of a request to its context, until the request ends."""
        if request.context is not None:
            request.context.num_holders += 1
            request.context.num_requests += 1

    def let_go(self, hold: PrefixHold) -> None:
        """Release one reference of a hold."""
        if self._cache is not None:
            self._cache.let_go(hold)

    def let_go_later(self, hold: PrefixHold) -> None:
        """The same before the next step; thread-safe, also in finalisers."""
        if self._cache is not None:
            self._cache.holds.leave_later(hold)

    def leave(self, request: Request) -> None:
        """Release the hold of an ended request."""
        if request.context is not None:
            request.context.num_requests -= 1
            request.context.touch()
            self.let_go(request.context)

    def sweep(self) -> None:
        """Release holds whose owners were garbage-collected, or have not used them for a while."""
        if self._cache is not None:
            left = self._cache.holds.left
            for _ in range(len(left)):
                self._cache.let_go(left.popleft())
            if self._cache.holds.idle_s is not None:
                self._cache.release_idle()

    def open(self, request: Request) -> None:
        """Pin the computed prompt of a running request, if it opens a context."""
        hold = request.opens
        if hold is None or self._cache is None:
            return
        node = self._cache.end_of(request)
        assert node is not None, f"expected the prompt of {request} in the prefix cache"
        assert node.depth == hold.num_blocks, f"expected {request} to end at a block border"
        hold.refusal = self.refusal([*node.path][::-1], hold.num_blocks, request)
        if hold.refusal is None:
            self._cache.hold(hold, node)

    def open_cached(self, hold: PrefixHold) -> bool:
        """Pin a prefix if all of it is cached and a request can continue from it; returns whether it did.

        Raises:
            ValueError: there is no room for it, or would be none once it is computed.
        """
        assert self._cache is not None, "see check_possible"
        path = self._cache.tree.match(hold.namespace, hold.tokens)
        if (reason := self.refusal(path, hold.num_blocks)) is not None:
            raise ValueError(reason)
        if len(path) < hold.num_blocks or (self._cache.needs_snapshots and path[-1].snapshot is None):
            return False
        self._cache.hold(hold, path[-1])
        return True

    def check_possible(self) -> None:
        """Raise ValueError if this engine cannot pin prefixes at all."""
        if self._cache is None:
            raise ValueError(
                "expected a model with a prefix cache for contexts, got enable_prefix_caching=False"
            )
        if self._cache.needs_snapshots and not self._cache.num_snapshot_rows:
            raise ValueError(
                "expected num_prefix_snapshots of 1 or more for contexts of a model with streaming "
                "heads or sliding windows, got 0"
            )

    def refusal(self, path: list[PrefixNode], num_blocks: int, but: Request | None = None) -> str | None:
        """Return the reason why a prefix cannot be pinned now; None if it can.

        Args:
            path: what the cache has of it.
            num_blocks: blocks of it.
            but: a request that is about to end.
        """
        assert self._cache is not None, "expected one block or more"
        holds, allocations = self._cache.holds, self._allocations
        is_new = len(path) < num_blocks or not holds.ends_at(path[-1])
        if self._cache.needs_snapshots and is_new and holds.num_ends >= self._cache.num_snapshot_rows:
            return (
                f"expected a snapshot for a context, and others have all {self._cache.num_snapshot_rows}: "
                "close one, or load with a larger num_prefix_snapshots"
            )
        if not allocations.uses_blocks:
            return None
        num_new = holds.num_new(path, num_blocks)
        room = allocations.blocks.num_blocks - holds.num_nodes
        others = (each for each in self._unfinished.values() if each is not but)
        needed = max(map(allocations.most_blocks, others), default=0)
        if num_new + needed > room:
            beside = f", beside a request that may need {needed} of its own" if needed else ""
            return (
                f"expected at most {room - needed} further blocks in contexts{beside}, got {num_new}: they "
                f"hold {holds.num_nodes} of {allocations.blocks.num_blocks}; close one, or load with more"
            )
        return None


_MOST_COMPARED = 64
"""Number of waiting requests that one is compared with."""
_LEAST_GAIN = 8
"""A chunk ends at a prompt's last block border if later requests could save so many nearly empty steps."""


class Begin(NamedTuple):
    """The beginning of a request.

    Attributes:
        hit: cached prefix that it begins with, None without one.
        stops: branch points at which its chunks end, in tokens.
    """

    hit: PrefixHit | None
    stops: tuple[int, ...] = ()


class PrefixSharing:
    """Caches prefixes that requests compute, and detects shared prefixes before they are computed.

    Snapshots are stored at block borders where they are likely to be reused: at the last one of a prompt, at
    each that a decode passes, after each chunk of a prompt while rows are free, and at *branch points*, where
    texts diverge. A chunk ends at the last block border of a prompt, if no other prompt has to wait for that,
    and a nearly empty step is cheap relative to the prefix. A branch point is detected when a request finds
    more cached blocks than it can use, and when a waiting request begins like one that is admitted. A chunk
    ends there once, so that the next request with the same beginning can use all of it.

    A request with a cached prefix needs a chunk row, of which a step has few, and even a nearly empty step is
    expensive. So no request waits for a prefix, and no chunk ends at it, if recomputing it costs less than a
    chunk row's share of a nearly empty step.

    All methods do nothing if prefixes are not cached.

    Args:
        limits: of steps.
        allocations: with the prefix cache.
        holding: pins prefixes.
    """

    def __init__(self, limits: StepLimits, allocations: KVAllocations, holding: PrefixHolding) -> None:
        self._allocations, self._cache, self._holding = allocations, allocations.prefixes, holding
        self._block_size, self._grid = allocations.block_size, allocations.prefix_grid
        # Prefixes can be shared up to block borders, or chunk borders where chunks decide what is stored.
        self._part_size = self._grid or self._block_size
        self._recomputed = limits.step_tokens // limits.max_chunk_rows
        self._least_gain = _LEAST_GAIN * limits.step_tokens
        # Half of the snapshots are reserved for branch points.
        self._most_stops = max(1, limits.num_snapshots // 2)

    def keep(self, plan: StepPlan) -> None:
        """Cache the blocks of a committed step, before anything is released."""
        if self._cache is None:
            return
        for row in plan.rows:
            request = row.request
            if request.status is not RequestStatus.RUNNING:
                continue
            is_decode, size = row.num_new_tokens <= plan.decode_len, self._block_size
            has_crossed = row.start // size < request.num_computed_tokens // size
            if is_decode and not has_crossed and row.start >= request.num_prompt_tokens:
                self._cache.store(request)  # the common case
                continue
            ends_prompt = row.start < request.num_prompt_tokens <= row.end
            is_known = row.end == self._last_border(request) if self._grid else ends_prompt
            ends_chunk = row.end < request.num_prompt_tokens and self._cache.has_free_row
            # Rows that were decoded to or past a block border.
            if is_decode and has_crossed:
                self._cache.take_snapshot(request, decodes=True)
            elif self._is_at_border(request) and (is_known or ends_chunk or row.end in request.stops):
                self._cache.take_snapshot(request)
            self._cache.store(request)
            if ends_prompt:
                self._holding.open(request)

    def _is_at_border(self, request: Request) -> bool:
        return request.num_computed_tokens % self._block_size == 0

    def _last_border(self, request: Request) -> int:
        """Tokens up to a prompt's last chunk border, else up to the last block border of prefilled tokens."""
        if self._grid:
            return request.num_prefilled_tokens // self._grid * self._grid
        num_tokens = request.num_tokens
        if request.params.decoded_prompt_tokens:
            num_tokens = request.num_prefilled_tokens
        return num_tokens // self._block_size * self._block_size

    def keep_end(self, request: Request, *, is_preempted: bool = False) -> None:
        """Cache the blocks of a running request before it is released; no step may be in flight."""
        if self._cache is not None:
            self._cache.keep_end(request, is_preempted=is_preempted)

    def forget(self) -> None:
        """Clear the cache; requests have been released."""
        if self._cache is not None:
            self._cache.clear()

    def begin(
        self, request: Request, hit: PrefixHit | None, step: StepDraft, waiting: Iterable[Request]
    ) -> Begin | None:
        """Return how a waiting request begins if it is admitted; None if the step has no tokens for it.

        It ignores a short hit that would have to wait for a chunk row, if computing the whole text would not.

        Args:
            hit: what is cached of it.
            waiting: waiting requests, this one may be among them.
        """
        stops = self._stops(request, hit, waiting)
        start, blocks = self._allocations.num_cached_tokens(hit), self._allocations.cached_blocks(hit)
        border = self._last_border(request)
        # A request that was preempted, or lost its cache in a failed step, does not wait.
        has_run = request.num_cached_tokens is not None
        if not has_run and not self._grid and self._takes_snapshots and border - start > self._least_gain:
            with_border = tuple(sorted({*stops, border}))
            if step.has_room(request, start, blocks, with_border):
                return Begin(hit, with_border)
        if step.has_room(request, start, blocks, stops):
            return Begin(hit, stops)
        is_short = 0 < start <= self._recomputed and request.context is None
        return Begin(PrefixHit()) if is_short and step.fits_whole(request) else None

    def _stops(self, request: Request, hit: PrefixHit | None, waiting: Iterable[Request]) -> tuple[int, ...]:
        """Return the branch points of a request that is admitted, in tokens; see ``begin``."""
        if self._cache is None or hit is None or not self._takes_snapshots:
            return ()
        known = hit.num_usable * self._block_size + self._recomputed
        parted = len(hit.path) * self._block_size // self._part_size * self._part_size
        shared = Counter(
            self.num_shared(request, other)
            for other in islice(waiting, _MOST_COMPARED)
            if other is not request
        )
        points = sorted((p for p in shared if p > known), key=lambda p: shared[p] * (p - known))
        return tuple(sorted({*points[-self._most_stops :], *([parted] if parted > known else [])}))

    @property
    def _takes_snapshots(self) -> bool:
        """Whether heads have rings, and a snapshot row for them is free."""
        return self._cache is not None and self._cache.needs_snapshots and self._cache.has_place

    def loads(self, request: Request, hit: PrefixHit | None, has_room: bool) -> bool:
        """Whether a waiting request should wait for records of its prefix; see ``PrefixCache.fetches``.

        Args:
            has_room: whether it could be admitted now; otherwise nothing is loaded for it yet.
        """
        if self._cache is None or self._cache.tiers is None or hit is None:
            return False
        return (has_room or self._cache.tiers.is_loading(request)) and self._cache.fetches(request, hit)

    def loads_no_more(self, request: Request) -> None:
        """End the load of a request that is admitted, or has ended."""
        if self._cache is not None and self._cache.tiers is not None:
            self._cache.tiers.admitted(request)

    def comes_soon(
        self, request: Request, hit: PrefixHit | None, running: Iterable[Request], step: StepDraft
    ) -> bool:
        """Whether a waiting request should wait for a prefix that a running one is about to compute.

        It should if both share a prefix that is longer than the cached one, and the running request has not
        computed all of it yet. If heads have rings, the running request then ends a chunk at the end of that
        prefix, so that a snapshot can be stored there.

        Args:
            step: the shares that running requests have in the step.
        """
        if self._cache is None or hit is None:
            return False
        needs_stop = self._cache.needs_snapshots
        if needs_stop and not self._takes_snapshots:
            return False
        known = hit.num_usable * self._block_size
        for other in running:
            if other.num_uncomputed_tokens == 1:
                continue
            shared = self.num_shared(request, other)
            if shared <= max(known, other.num_computed_tokens):
                continue
            if not needs_stop or (
                shared > known + self._recomputed and self._will_stop(other, shared, known, step)
            ):
                return True
        return False

    def _will_stop(self, other: Request, shared: int, known: int, step: StepDraft) -> bool:
        """Whether a running request ends a chunk at the end of a shared prefix, or of enough of it."""
        computed = other.num_computed_tokens
        if shared in other.stops:
            return True
        to_come = [stop for stop in other.stops if computed < stop < self._last_border(other)]
        if shared >= computed + step.share(other) and len(to_come) < self._most_stops:
            other.stops = tuple(sorted((*other.stops, shared)))
            return True
        return any(known + self._recomputed < stop < shared for stop in to_come)

    def num_shared(self, request: Request, other: Request) -> int:
        """Return the tokens of the common prefix of two requests that either can reuse, in whole blocks.

        In whole chunks of both prompts, where chunks decide what heads store.
        """
        if request.namespace != other.namespace:
            return 0
        size, most = self._part_size, min(request.num_reusable_tokens, other.num_tokens)
        if self._grid:
            most = min(most, request.num_prefilled_tokens, other.num_prefilled_tokens)
        most = most // size * size
        if not most or not np.array_equal(request.tokens[:size], other.tokens[:size]):
            return 0
        differs = request.tokens[:most] != other.tokens[:most]
        first = int(differs.argmax()) if differs.any() else most
        return first // size * size
