"""Admission of waiting requests: whether they fit beside what running ones need."""

from __future__ import annotations

from hpu_duo.engine.step_plan import StepDraft
from hpu_duo.kv.allocations import KVAllocations
from hpu_duo.kv.prefix import PrefixHit
from hpu_duo.request import Request
from hpu_duo.sampling.params import FieldError
from hpu_duo.scheduling import ArrivalOrder, SchedulingPolicy


class Admission:
    """Checks whether a waiting request fits into a step, beside what running requests need.

    A request fits if a row, a token of the step, and blocks are free: those for all of its known tokens and
    one more, beside what every running request still needs for its own.

    Args:
        running: the requests that have a row.
    """

    def __init__(self, allocations: KVAllocations, running: ArrivalOrder, policy: SchedulingPolicy) -> None:
        self._allocations, self._running, self._policy = allocations, running, policy
        self._num_due: int | None = None

    def check(self, request: Request) -> None:
        """Reject a request that could never run.

        Raises:
            ValueError: the blocks that contexts leave are too few even for this request alone; or its prompt
                does not begin with its context.
            FieldError: it has a priority, which the policy does not use.
        """
        params, allocations = request.params, self._allocations
        if params.priority and not self._policy.honours_priority:
            raise FieldError(
                "priority",
                f"expected 0, got {params.priority}: the scheduling policy of this engine does not use "
                "priorities, scheduling_policy='priority' does",
            )
        needed, num_blocks = (
            allocations.num_blocks_for(request.max_cached_tokens),
            allocations.capacity,
        )
        if needed > num_blocks:
            raise ValueError(
                f"{request.name} may cache up to {request.max_cached_tokens} tokens, which "
                f"need {needed} blocks of {allocations.block_size}, got {num_blocks} blocks"
            )
        if request.context is not None:
            request.context.check(request.name, request.prompt_token_ids, request.namespace)
        own, held = allocations.most_blocks(request), allocations.num_needed_blocks
        if own + held > num_blocks:
            raise ValueError(
                f"{request.name} may need {own} blocks of its own, and contexts leave {num_blocks - held} of "
                f"{num_blocks}: close one, or request fewer tokens"
            )

    def begin_step(self) -> None:
        """Invalidate the count of blocks that running requests need."""
        self._num_due = None

    def may_admit(self, step: StepDraft) -> bool:
        """Whether any waiting request can be admitted."""
        return self._policy.displaces or self._has_row_and_token(step)

    def has_room(self, request: Request, hit: PrefixHit | None, step: StepDraft) -> bool:
        """Whether a waiting request fits.

        Args:
            hit: the cached prefix that it would begin with.
        """
        needed = self._num_blocks_due + self._allocations.num_blocks_due(request, hit)
        return self._has_row_and_token(step) and needed <= self._allocations.num_obtainable

    def displaced_for(self, request: Request, hit: PrefixHit | None, step: StepDraft) -> list[Request]:
        """Return the running requests that the policy preempts so that a waiting one fits.

        Returns:
            None of them if it fits as it is, or would not fit without them either.
        """
        if not self._policy.displaces or self.has_room(request, hit, step):
            return []
        is_new = request.admitted_at is None
        others = [each for each in self._running if is_new or each.num_tokens > each.num_tokens_when_admitted]
        displaced: list[Request] = []
        while (other := self._policy.displaced(request, others)) is not None:
            others.remove(other)
            displaced.append(other)
            if self._would_fit(request, hit, step, displaced):
                self._num_due = None
                return displaced
        return []

    def admitted(self, request: Request) -> None:
        """Count the blocks that an admitted request still needs."""
        self._num_due = self._num_blocks_due + self._allocations.num_blocks_due(request)

    @property
    def _num_blocks_due(self) -> int:
        if self._num_due is None:
            self._num_due = sum(map(self._allocations.num_blocks_due, self._running))
        return self._num_due

    def _has_row_and_token(self, step: StepDraft) -> bool:
        return step.num_free_tokens > 0 and self._allocations.rows.num_free > 0

    def _would_fit(
        self, request: Request, hit: PrefixHit | None, step: StepDraft, displaced: list[Request]
    ) -> bool:
        """Whether a request fits once others are released."""
        allocations = self._allocations
        if not step.num_free_tokens and not any(map(step.share, displaced)):
            return False
        num_due = self._num_blocks_due - sum(map(allocations.num_blocks_due, displaced))
        num_freed = sum(map(allocations.num_blocks_of_its_own, displaced))
        needed = num_due + allocations.num_blocks_due(request, hit)
        return needed <= allocations.num_obtainable + num_freed
