"""Parallel samples of one prompt: all but the first wait for the prompt, and fork the cache of the first."""

from __future__ import annotations

from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.kv.allocations import KVAllocations
from hpu_duo.request import Request


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
