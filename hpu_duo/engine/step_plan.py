"""The plan of one step: its rows, the copies before it, and their results.

Parallel samples of one prompt wait for the prompt, all but the first, and fork its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphs import StepLimits
from hpu_duo.kv.allocations import KVAllocations
from hpu_duo.kv.pool import Copy
from hpu_duo.kv.tiers.link import Transfers
from hpu_duo.request import NO_REGION, FinishReason, Request, RequestStatus
from hpu_duo.scheduling import SchedulingPolicy

_arrival = attrgetter("arrival")

FROM_DEVICE = -1
"""Stands for a token that a model samples before the step, on the device."""


class ScheduledRow(NamedTuple):
    """The share of one request in a step: tokens ``[start, start + num_new_tokens)`` of it.

    Attributes:
        request: the request.
        ring_row: its ring row during this step.
        start: tokens that are in the cache before the step.
        num_new_tokens: tokens to compute, 1 or more.
        num_samples: tokens to sample, one after each of the last ``num_samples`` new tokens; 0 while known
            tokens remain to be computed.
        region: of its prompt, where prompts are stored whole until they are computed.
    """

    request: Request
    ring_row: int
    start: int
    num_new_tokens: int
    num_samples: int
    region: int = NO_REGION

    @property
    def wants_token(self) -> bool:
        """Whether all known tokens are computed after the step, so that logits are needed."""
        return self.num_samples > 0

    @property
    def end(self) -> int:
        """Tokens that are in the cache after the step."""
        return self.start + self.num_new_tokens


@dataclass(frozen=True)
class StepPlan:
    """One step: copies to execute first, then rows to compute.

    Attributes:
        rows: decode rows, then prompt rows with older context, then prompt rows without; in order of arrival
            within each kind.
        decode_len: most new tokens of a decode row.
        fills_rows: whether its shape has rows of ``decode_len`` tokens, whose number depends on the step.
        moves: device copies, to execute one after the other before the step writes anything.
        transfers: between device and host, that begin after them.
        preempted: requests that were preempted while this step was planned, the latest arrival first.
        has_model_drafts: whether a model drafts for some rows before the step; ``Request.tokens`` has
            ``FROM_DEVICE`` in place of these drafts.
    """

    rows: tuple[ScheduledRow, ...]
    moves: tuple[Copy, ...] = ()
    preempted: tuple[Request, ...] = ()
    decode_len: int = 1
    fills_rows: bool = False
    has_model_drafts: bool = False
    transfers: Transfers | None = None

    @cached_property
    def num_tokens(self) -> int:
        """Query tokens of the step, unpadded."""
        return sum(row.num_new_tokens for row in self.rows)

    @cached_property
    def sampled_rows(self) -> tuple[ScheduledRow, ...]:
        """The rows to sample tokens for, in row order."""
        return tuple(row for row in self.rows if row.num_samples)

    @cached_property
    def num_samples(self) -> int:
        """Number of tokens that the step samples."""
        return sum(row.num_samples for row in self.rows)

    def accepted(self, num_token_ids: int, num_accepted: Sequence[int] | None) -> list[int]:
        """Return the number of accepted tokens of each of ``sampled_rows``.

        Args:
            num_token_ids: number of sampled tokens.
            num_accepted: accepted tokens of each row, 1 or more; None = all.

        Raises:
            ValueError: the numbers do not match the plan.
        """
        if num_token_ids != self.num_samples:
            raise ValueError(f"expected {self.num_samples} sampled tokens, got {num_token_ids}")
        most = [row.num_samples for row in self.sampled_rows]
        if num_accepted is None:
            return most
        accepted = list(num_accepted)
        if len(accepted) != len(most) or not all(1 <= n <= of for n, of in zip(accepted, most)):
            raise ValueError(f"expected 1 or more and at most {most} accepted tokens, got {accepted}")
        return accepted


class CommittedToken(NamedTuple):
    """A token that a step added to a request, and whether that ended it.

    Attributes:
        number: index among the request's output tokens.
        sample: index among the plan's samples, row after row.
    """

    request: Request
    token: int
    finish_reason: FinishReason | None
    number: int = 0
    sample: int = 0


class ChunkRows:
    """Counter of prompt rows with older context in a step, at most ``max_chunk_rows``.

    Rows that read the same blocks count once, since the shared part has each block once. Where heads have
    rings, each row counts, since it needs a scratch of its own; so does each prompt row on a grid of chunks.
    """

    def __init__(self, limits: StepLimits) -> None:
        self._most = limits.max_chunk_rows
        self._block_size = limits.block_size
        self._count_once = limits.uses_blocks and not limits.uses_rows and not limits.chunk_grid
        self._contexts: dict[Request, bytes] = {}

    def context_of(self, request: Request) -> bytes:
        """Blocks with the older context of a running request, as a key."""
        num_blocks = -(-request.num_computed_tokens // self._block_size)
        return request.block_table[:num_blocks].tobytes()

    def has_room(self, context: bytes) -> bool:
        """Whether a row with this context can be added."""
        contexts = self._contexts.values()
        if not self._count_once:
            return len(contexts) < self._most
        found = {*contexts}
        return context in found or len(found) < self._most

    def add(self, request: Request) -> None:
        """Count a request."""
        self._contexts[request] = self.context_of(request)

    def discard(self, request: Request) -> None:
        """Uncount a request, if it was counted."""
        self._contexts.pop(request, None)


class StepDraft:
    """A step during planning: the share of each request, and the remaining budgets."""

    def __init__(self, limits: StepLimits) -> None:
        self.num_free_tokens = limits.max_num_batched_tokens
        self._grid, self._last_chunk = limits.chunk_grid, limits.last_chunk
        # Of steps with prompts; drafts may make rows of other steps longer.
        self._draft_lens = lens = limits.draft_lens
        self._decode_len = lens[0] if lens else limits.decode_len
        self._decodes_one = self._decode_len == 1 and not self._grid
        self.preempted: list[Request] = []
        self._max_chunk_rows = limits.max_chunk_rows
        self._chunks = ChunkRows(limits)
        self._has_drafts = self._has_model_drafts = False
        self._shares: dict[Request, int] = {}
        # Running requests that could compute more than they do in this step.
        self._cut: set[Request] = set()

    @property
    def is_empty(self) -> bool:
        """Whether no request has a share."""
        return not self._shares

    def share_of(self, request: Request) -> tuple[int, bool]:
        """Number of tokens that a running request may compute in this step, and whether it could do more.

        0 tokens = it waits for the next step.
        """
        start = request.num_computed_tokens
        if self._decodes_one and request.num_tokens - start == 1 and self.num_free_tokens:
            return 1, False  # the common case
        return self._share(request, start, request.stops, lambda: self._chunks.context_of(request))

    def has_room(self, request: Request, start: int, blocks: Sequence[int], stops: tuple[int, ...]) -> bool:
        """Whether a request that does not run yet would get a share, and the rest of it in the next step.

        Otherwise it would occupy a row without use, and a step with fewer tokens than rows has no bucket.

        Args:
            start: tokens of it that would be in the cache.
            blocks: their blocks.
            stops: where its chunks would end.
        """
        num_new, is_cut = self._share(request, start, stops, np.array(blocks, np.int32).tobytes)
        return num_new > 0 and (not is_cut or self.may_cut(request))

    def fits_whole(self, request: Request) -> bool:
        """Whether a request that does not run yet could compute all of its tokens in this step."""
        num_new = self._share(request, 0, (), bytes)[0]
        return num_new >= max(1, request.num_prefilled_tokens if self._grid else request.num_tokens)

    def _share(
        self, request: Request, start: int, stops: tuple[int, ...], context: Callable[[], bytes]
    ) -> tuple[int, bool]:
        """Number of tokens that a request gets, and whether it could compute more.

        ``context`` is called for chunks only: a decode's is not copied in each step.
        """
        if self._grid:
            return self._chunk(request, start, context)
        most = request.num_next_tokens(self._decode_len, start)
        num_new = min(most, self.num_free_tokens)
        num_new = next((stop - start for stop in stops if start < stop < start + num_new), num_new)
        if num_new > self._decode_len and start and not self._chunks.has_room(context()):
            num_new = 0
        return num_new, num_new < most

    def _chunk(self, request: Request, start: int, context: Callable[[], bytes]) -> tuple[int, bool]:
        """The same on a grid of chunks: a whole chunk or nothing."""
        num_new = request.num_chunk_tokens(self._grid, start, self._last_chunk)
        is_cut = start + num_new < request.num_prefilled_tokens
        is_free = num_new <= self.num_free_tokens and (num_new == 1 or self._chunks.has_room(context()))
        return (num_new, is_cut) if is_free else (0, start < request.num_prefilled_tokens)

    def may_cut(self, request: Request) -> bool:
        """Whether a further request may be chunked: in the next step each chunked one needs a chunk row."""
        return len(self._cut) - (request in self._cut) < self._max_chunk_rows

    def share(self, request: Request) -> int:
        """Number of tokens scheduled for the request; 0 for none."""
        return self._shares.get(request, 0)

    def add(self, request: Request, num_new_tokens: int, is_cut: bool) -> None:
        """Schedule what ``share_of`` returned for the request, 0 tokens included."""
        if is_cut:
            self._cut.add(request)
        if not num_new_tokens:
            return
        self._shares[request] = num_new_tokens
        self.num_free_tokens -= num_new_tokens
        if num_new_tokens > self._decode_len and (request.num_computed_tokens or self._grid):
            self._chunks.add(request)

    def num_draftable(self, request: Request) -> int:
        """Most drafts that a request may compute besides: of a decode, as many tokens as are left over."""
        if self._shares.get(request) != 1 or request.num_uncomputed_tokens != 1:
            return 0
        most = self._draft_lens[-1] if self._draft_lens else self._decode_len
        num_coming = request.num_drafts if self._draft_lens else 0
        return min(most - 1, self.num_free_tokens, max(num_coming, request.most_drafts))

    @property
    def num_rows(self) -> int:
        """Requests with a share."""
        return len(self._shares)

    @property
    def has_prompts(self) -> bool:
        """Whether a row is no decode, in a step that may have no drafts then."""
        return bool(self._draft_lens) and max(self._shares.values(), default=0) > self._decode_len

    def add_drafts(self, request: Request, drafts: Sequence[int] | NDArray[np.integer]) -> None:
        """Schedule drafts behind the last known token of a decode, and write them there."""
        self._has_drafts = True
        self._has_model_drafts |= bool(drafts[0] == FROM_DEVICE)
        self._shares[request] += len(drafts)
        self.num_free_tokens -= len(drafts)
        request.tokens[request.num_tokens : request.num_tokens + len(drafts)] = drafts

    def preempt(self, request: Request) -> None:
        """Mark the request as preempted, and remove its share, if any.

        To be called before ``num_computed_tokens`` of the request is reset.
        """
        num_new_tokens = self._shares.pop(request, 0)
        self.num_free_tokens += num_new_tokens
        self._chunks.discard(request)
        self._cut.discard(request)
        self.preempted.append(request)

    def shorten(self, request: Request, num_tokens: int) -> None:
        """Remove the last tokens of a share, but not all of it."""
        assert 0 < num_tokens < self._shares[request], f"{num_tokens} of {self._shares[request]} tokens"
        self._shares[request] -= num_tokens
        self._cut.add(request)
        self.num_free_tokens += num_tokens

    def finish(self, moves: tuple[Copy, ...], transfers: Transfers | None = None) -> StepPlan:
        """Return the plan. Every request has its row of the step by now, after ``moves``."""
        kinds: tuple[list[ScheduledRow], ...] = ([], [], [])
        shares, decode_len = self._shares, self._decode_len
        if self._has_drafts and self._draft_lens:
            longest = max(shares.values())
            decode_len = next(each for each in self._draft_lens if each >= longest)
        for request in sorted(shares, key=_arrival):
            start, num_new = request.num_computed_tokens, shares[request]
            num_samples = start + num_new - request.num_tokens + 1
            if num_samples < 0:
                num_samples = 0
            row = ScheduledRow(request, request.row, start, num_new, num_samples, request.region)
            kinds[0 if num_new <= decode_len else 1 if start else 2].append(row)
        decodes, continued, begun = kinds
        fills_rows = decode_len > self._decode_len
        return StepPlan(
            (*decodes, *continued, *begun),
            moves,
            tuple(self.preempted),
            decode_len,
            fills_rows,
            self._has_model_drafts,
            transfers,
        )


def append_tokens(
    plan: StepPlan,
    token_ids: Sequence[int] | NDArray[np.integer],
    num_accepted: Sequence[int],
    policy: SchedulingPolicy,
) -> list[CommittedToken]:
    """Update the requests of a step: count computed tokens, append sampled ones. Skips those not running.

    This is the one place where computed tokens are rolled back: by counting, since the next step overwrites
    keys and values of rejected tokens.

    Args:
        token_ids: ``num_samples`` for each row of ``plan.sampled_rows``, row after row.
        num_accepted: number of accepted tokens of each of these rows.
        policy: gets what each request has had, without what is rolled back.
    """
    accepted = iter(num_accepted)
    committed = []
    sample, running, charge = 0, RequestStatus.RUNNING, policy.charge
    for request, _, start, num_new, num_samples, _ in plan.rows:
        place = sample
        sample += num_samples
        end = place + (next(accepted) if num_samples else 0)
        if request.status is not running:
            continue
        num_appended = 0
        while place < end:
            token, number = int(token_ids[place]), request.num_output_tokens
            reason = request.append(token)
            committed.append(CommittedToken(request, token, reason, number, place))
            num_appended += 1
            place += 1
            if reason is not None:
                break
        # Tokens after the one that ends a request are no output: neither cached nor charged.
        num_kept = num_new - (num_samples - num_appended)
        request.num_computed_tokens = start + num_kept
        charge(request, num_kept, num_appended)
    return committed


class ParallelSamples:
    """Requests that wait for their parent, by parent.

    Samples wait while their parent computes the prompt. Then each forks its cache up to the last prompt
    token, which is recomputed to sample a first token of its own.

    Args:
        allocations: of the caches that are forked.
        decode_len: most tokens of a row that decodes.

    Attributes:
        waiting: those that wait, by parent.
    """

    def __init__(self, allocations: KVAllocations, decode_len: int) -> None:
        self._allocations, self._decode_len = allocations, decode_len
        self.waiting: dict[Request, list[Request]] = {}

    @staticmethod
    def may_wait_for(parent: Request) -> bool:
        """Whether an unfinished parent will have a cache that can be forked."""
        return (
            parent.num_prompt_tokens > 1
            and parent.num_computed_tokens < parent.num_prompt_tokens
            and parent.num_output_tokens == 0
        )

    def add(self, sibling: Request) -> None:
        """Let a request wait for its parent."""
        assert sibling.parent is not None, "expected a request with a parent"
        self.waiting.setdefault(sibling.parent, []).append(sibling)

    def remove(self, sibling: Request) -> None:
        """Let a request wait no longer."""
        assert sibling.parent is not None, "expected a request with a parent"
        self.waiting[sibling.parent].remove(sibling)

    def parents_prefilled_by(self, plan: StepPlan) -> list[Request]:
        """Return the parents with waiting samples whose prompt is complete after a step."""
        return [
            row.request
            for row in plan.rows
            if row.request in self.waiting and row.end >= row.request.num_prompt_tokens
        ]

    def release(self, parent: Request) -> list[Request]:
        """Remove and return the samples that wait for a parent, because its cache is freed."""
        return self.waiting.pop(parent, [])

    def fork(self, parent: Request) -> list[tuple[Request, bool]]:
        """Fork the cache of a parent to the samples that wait for it.

        Returns:
            Each sample, and whether it was forked; others find no room, or it is too late.
        """
        num_tokens = parent.num_prompt_tokens - 1
        # The ring still has all that a child sees, which starts ``decode_len`` tokens earlier.
        num_behind = parent.num_computed_tokens - parent.num_prompt_tokens
        is_at_end_of_prompt = 0 <= num_behind < self._decode_len
        forked = []
        for child in self.waiting.pop(parent):
            has_cache = is_at_end_of_prompt and self._allocations.fork(parent, child, num_tokens)
            if has_cache:
                child.num_computed_tokens = num_tokens
            forked.append((child, has_cache))
        return forked
