"""Decisions of the scheduler about cached prefixes: what stays, who waits, who keeps them."""

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
from hpu_duo.prefix_hold import PrefixHold
from hpu_duo.request import Request, RequestStatus


class PrefixHolding:
    """Opens holds of prefixes, and keeps them as long as their requests need them.

    All unfinished requests must fit beside what is held, each alone, so that none waits for a hold to end:
    a request that would not is refused, and so is a hold beside which one would not.

    Args:
        allocations: with the prefix cache; without one nothing can be held.
        unfinished: requests by their names.
    """

    def __init__(self, allocations: KVAllocations, unfinished: Mapping[str, Request]) -> None:
        self._allocations, self._unfinished, self._cache = allocations, unfinished, allocations.prefixes

    def enter(self, request: Request) -> None:
        """Let a request hold its context until it ends."""
        if request.context is not None:
            request.context.num_holders += 1

    def let_go(self, hold: PrefixHold) -> None:
        """Take one holder from a hold that was opened."""
        if self._cache is not None:
            self._cache.let_go(hold)

    def let_go_later(self, hold: PrefixHold) -> None:
        """The same before the next step, from any thread and at any moment."""
        if self._cache is not None:
            self._cache.holds.leave_later(hold)

    def leave(self, request: Request) -> None:
        """Let go what an ended request holds."""
        if request.context is not None:
            self.let_go(request.context)

    def sweep(self) -> None:
        """Let go what nobody can ask for any more."""
        if self._cache is not None:
            left = self._cache.holds.left
            for _ in range(len(left)):
                self._cache.let_go(left.popleft())

    def open(self, request: Request) -> None:
        """Hold the prompt of a running request, all of which is computed, if it asks for that."""
        hold = request.opens
        if hold is None or self._cache is None:
            return
        node = self._cache.end_of(request)
        assert node is not None, f"{request} has entered its prompt"
        assert node.depth == hold.num_blocks, f"{request} ends at a border of blocks"
        hold.refusal = self.refusal([*node.path][::-1], hold.num_blocks, request)
        if hold.refusal is None:
            self._cache.hold(hold, node)

    def open_cached(self, hold: PrefixHold) -> bool:
        """Hold a prefix if all of it is cached, and a request can go on behind it.

        Raises:
            ValueError: there is no room for it, or would be none if it were computed.
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
        """Raise ValueError if nothing can be held here, however much room there is."""
        if self._cache is None:
            raise ValueError(
                "expected a model with a prefix cache to hold a context in, got enable_prefix_caching=False"
            )
        if self._cache.needs_snapshots and not self._cache.num_snapshot_rows:
            raise ValueError(
                "expected num_prefix_snapshots of 1 or more to hold a context of a model with streaming "
                "heads or sliding windows, got 0"
            )

    def refusal(self, path: list[PrefixNode], num_blocks: int, but: Request | None = None) -> str | None:
        """Return the reason why a prefix cannot be held now; None if it can.

        Args:
            path: what the cache has of it.
            num_blocks: blocks of it.
            but: a request that is about to end.
        """
        assert self._cache is not None, "something is to be held"
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
"""Requests of a queue that one is compared with."""
_LEAST_GAIN = 8
"""A prompt is cut at its last border of blocks if a later request could save as many almost empty steps."""


class Begin(NamedTuple):
    """The beginning of a request.

    Attributes:
        hit: what it takes up from the cache, None without one.
        stops: branch points at which its chunks end, in tokens.
    """

    hit: PrefixHit | None
    stops: tuple[int, ...] = ()


class PrefixSharing:
    """Keeps what requests compute, and finds out what they share before it is computed.

    Snapshots are taken at borders of blocks, where they pay: at the last one of a prompt, at each that a
    decode passes, behind each chunk of a prompt while there are free rows, and at *branch points*, where
    texts part. A chunk ends at the last border of a prompt, if no other prompt has to wait for that, and an
    almost empty step is little beside what is computed up to there. A branch point
    is known when a request finds more cached blocks than it can use, and when a waiting request begins like
    one that gets a row. A chunk ends there once, so that the next request with the same beginning can use
    all of it.

    A request with a cached prefix takes a chunk row, of which a step has few, and a step costs much even if
    it is almost empty. So a prefix is not waited for, and no chunk ends behind it, if it costs less to
    compute it again than a chunk row's share of an almost empty step.

    All methods do nothing if prefixes are not cached.

    Args:
        limits: of steps.
        allocations: with the prefix cache.
        holding: of prefixes that stay.
    """

    def __init__(self, limits: StepLimits, allocations: KVAllocations, holding: PrefixHolding) -> None:
        self._allocations, self._cache, self._holding = allocations, allocations.prefixes, holding
        self._block_size, self._grid = allocations.block_size, allocations.prefix_grid
        # Requests may part at borders of blocks, or of chunks where these decide what is kept.
        self._part_size = self._grid or self._block_size
        self._recomputed = limits.step_tokens // limits.max_chunk_rows
        self._least_gain, self._decode_len = _LEAST_GAIN * limits.step_tokens, limits.decode_len
        # Half of the snapshots are kept for places where texts part.
        self._most_stops = max(1, limits.num_snapshots // 2)

    def keep(self, plan: StepPlan) -> None:
        """Keep what a step has computed, once its tokens are committed and before anything is given back."""
        if self._cache is None:
            return
        for row in plan.rows:
            request = row.request
            if request.status is not RequestStatus.RUNNING:
                continue
            ends_prompt = row.start < request.num_prompt_tokens <= row.end
            is_known = row.end == self._last_border(request) if self._grid else ends_prompt
            ends_chunk = row.end < request.num_prompt_tokens and self._cache.has_free_row
            is_decode, size = row.num_new_tokens <= self._decode_len, self._block_size
            # A row that was decoded to a border of blocks or past it.
            if is_decode and row.start // size < request.num_computed_tokens // size:
                self._cache.take_snapshot(request, decodes=True)
            elif self._is_at_border(request) and (is_known or ends_chunk or row.end in request.stops):
                self._cache.take_snapshot(request)
            self._cache.store(request)
            if ends_prompt:
                self._holding.open(request)

    def _is_at_border(self, request: Request) -> bool:
        return request.num_computed_tokens % self._block_size == 0

    def _last_border(self, request: Request) -> int:
        """Tokens up to the last border of chunks in a prompt, else of blocks in what is prefilled."""
        if self._grid:
            return request.num_prefilled_tokens // self._grid * self._grid
        num_tokens = request.num_tokens
        if request.params.decoded_prompt_tokens:
            num_tokens = request.num_prefilled_tokens
        return num_tokens // self._block_size * self._block_size

    def keep_end(self, request: Request) -> None:
        """Keep a running request that is about to give everything back; no step may be on its way."""
        if self._cache is not None:
            if self._is_at_border(request):
                self._cache.take_snapshot(request)
            self._cache.store(request)

    def forget(self) -> None:
        """Forget all that is cached; requests have given everything back."""
        if self._cache is not None:
            self._cache.clear()

    def begin(
        self, request: Request, hit: PrefixHit | None, step: StepDraft, waiting: Iterable[Request]
    ) -> Begin | None:
        """Return how a waiting request begins if it gets a row; None if the step has no share for it.

        It begins without a short hit that would have to wait for a chunk row, if the whole text does not.

        Args:
            hit: what is cached of it.
            waiting: requests that wait, it may be among them.
        """
        stops = self._stops(request, hit, waiting)
        start, blocks = self._allocations.num_cached_tokens(hit), self._allocations.cached_blocks(hit)
        border = self._last_border(request)
        # One that was preempted, or lost its cache in a failed step, goes on as soon as it can.
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
        """Return the branch points of a request that gets a row, in tokens; see ``begin``."""
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
        """Whether heads keep rings, and there is a place for another snapshot of them."""
        return self._cache is not None and self._cache.needs_snapshots and self._cache.has_place

    def comes_soon(
        self, request: Request, hit: PrefixHit | None, running: Iterable[Request], step: StepDraft
    ) -> bool:
        """Whether a waiting request should wait for what a running one is about to compute.

        It should if both share a prefix that is longer than the cached one, and the running request has not
        computed all of it yet. If heads keep rings, the running request then ends a chunk at the end of that
        prefix, so that a snapshot can be taken there.

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
        """Return the tokens of whole blocks that two requests begin with, of which either may be reused.

        Of whole chunks of both prompts, where these decide what heads keep.
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
