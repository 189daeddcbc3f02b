"""What one step computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpu_duo.kv.copies import Copy
from hpu_duo.request import FinishReason, Request


class ScheduledRow(NamedTuple):
    """The share of one request in a step: tokens ``[start, start + num_new_tokens)`` of it.

    Attributes:
        request: whose tokens.
        ring_row: its ring row during this step.
        start: tokens that are in the cache before the step.
        num_new_tokens: tokens to compute, 1 or more.
        wants_token: all its known tokens are computed after the step, so logits are needed for the last
            one and a token is sampled.
    """

    request: Request
    ring_row: int
    start: int
    num_new_tokens: int
    wants_token: bool

    @property
    def end(self) -> int:
        """Tokens that are in the cache after the step."""
        return self.start + self.num_new_tokens


@dataclass(frozen=True)
class StepPlan:
    """One step: copies to carry out first, then rows to compute.

    Attributes:
        rows: rows with one new token, then rows with several and older context, then rows with several
            and no context; in order of arrival within each kind.
        moves: device copies, to carry out one after the other before the step writes anything.
        preempted: requests that lost their place while this step was planned, the latest arrival first.
    """

    rows: tuple[ScheduledRow, ...]
    moves: tuple[Copy, ...] = ()
    preempted: tuple[Request, ...] = ()

    @cached_property
    def num_tokens(self) -> int:
        """Query tokens of the step, unpadded."""
        return sum(row.num_new_tokens for row in self.rows)

    @cached_property
    def num_single_rows(self) -> int:
        """Leading rows with one new token."""
        return sum(row.num_new_tokens == 1 for row in self.rows)

    @cached_property
    def num_chunk_rows(self) -> int:
        """Rows with several new tokens and older context; they follow the single rows."""
        return sum(row.num_new_tokens > 1 and row.start > 0 for row in self.rows)

    @cached_property
    def sampled_rows(self) -> tuple[ScheduledRow, ...]:
        """The rows that want a token, in row order: one logit row each."""
        return tuple(row for row in self.rows if row.wants_token)


class CommittedToken(NamedTuple):
    """A token that a step added to a request, and whether that ended it."""

    request: Request
    token: int
    finish_reason: FinishReason | None


class StepDraft:
    """A step while it is being planned: who has which share, and what is left of the budgets.

    Args:
        max_num_tokens: query tokens of the step.
        max_chunk_rows: rows with several new tokens and older context.
    """

    def __init__(self, max_num_tokens: int, max_chunk_rows: int) -> None:
        self.num_free_tokens = max_num_tokens
        self.preempted: list[Request] = []
        self._num_free_chunk_rows = max_chunk_rows
        self._shares: dict[Request, int] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nobody has a share."""
        return not self._shares

    def share_of(self, request: Request) -> int:
        """Tokens the request may compute in this step; 0 means that it waits for the next one."""
        num_new = min(request.num_next_tokens, self.num_free_tokens)
        return 0 if _is_chunk(request, num_new) and not self._num_free_chunk_rows else num_new

    def add(self, request: Request, num_new_tokens: int) -> None:
        """Schedule the next ``num_new_tokens`` tokens of the request."""
        self._shares[request] = num_new_tokens
        self.num_free_tokens -= num_new_tokens
        self._num_free_chunk_rows -= _is_chunk(request, num_new_tokens)

    def preempt(self, request: Request) -> None:
        """Note that the request loses its place, and take back the share it may have had.

        To be called while the request still says how much of it is computed.
        """
        num_new_tokens = self._shares.pop(request, 0)
        self.num_free_tokens += num_new_tokens
        self._num_free_chunk_rows += _is_chunk(request, num_new_tokens)
        self.preempted.append(request)

    def shorten(self, request: Request, num_tokens: int) -> None:
        """Take back the last tokens of a share; some of it stays."""
        assert 0 < num_tokens < self._shares[request], f"{num_tokens} of {self._shares[request]} tokens"
        self._shares[request] -= num_tokens
        self.num_free_tokens += num_tokens

    def finish(self, moves: tuple[Copy, ...]) -> StepPlan:
        """The plan, once ``moves`` have given every request the row it has during the step."""
        requests = sorted(self._shares, key=lambda r: (_kind(r, self._shares[r]), r.arrival))
        rows = tuple(_row(request, self._shares[request]) for request in requests)
        return StepPlan(rows, moves, tuple(self.preempted))


def _is_chunk(request: Request, num_new_tokens: int) -> bool:
    return num_new_tokens > 1 and request.num_computed_tokens > 0


def _kind(request: Request, num_new_tokens: int) -> int:
    if num_new_tokens == 1:
        return 0
    return 1 if request.num_computed_tokens else 2


def _row(request: Request, num_new_tokens: int) -> ScheduledRow:
    start = request.num_computed_tokens
    return ScheduledRow(
        request,
        ring_row=request.row,
        start=start,
        num_new_tokens=num_new_tokens,
        wants_token=start + num_new_tokens == request.num_tokens,
    )
