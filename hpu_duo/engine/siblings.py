"""Samples of one prompt: all but the first wait for its end, and fork what the first has cached."""

from __future__ import annotations

from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.kv.allocations import KVAllocations
from hpu_duo.request import Request


class ParallelSamples:
    """Requests that wait for their parent, by parent.

    A parent is waited for while it computes its prompt. A sibling then forks its cache up to the last prompt
    token, which it computes again to sample a first token of its own.

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
        """Whether a parent, if it is unfinished, will come to a cache that can be forked."""
        return (
            parent.num_prompt_tokens > 1
            and parent.num_computed_tokens < parent.num_prompt_tokens
            and parent.num_output_tokens == 0
        )

    def add(self, sibling: Request) -> None:
        """Let a request wait for its parent."""
        assert sibling.parent is not None, "a sibling has a parent"
        self.waiting.setdefault(sibling.parent, []).append(sibling)

    def remove(self, sibling: Request) -> None:
        """Let a request wait no longer."""
        assert sibling.parent is not None, "a sibling has a parent"
        self.waiting[sibling.parent].remove(sibling)

    def parents_prefilled_by(self, plan: StepPlan) -> list[Request]:
        """Parents with siblings whose prompt a step computes to its end."""
        return [
            row.request
            for row in plan.rows
            if row.request in self.waiting and row.end >= row.request.num_prompt_tokens
        ]

    def release(self, parent: Request) -> list[Request]:
        """Return those that wait for a parent, and that do so no longer: its cache is gone."""
        return self.waiting.pop(parent, [])

    def fork(self, parent: Request) -> list[tuple[Request, bool]]:
        """Give those that wait for a parent their share of its cache.

        Returns:
            Each with whether it has got one; the others find no room, or come too late.
        """
        num_tokens = parent.num_prompt_tokens - 1
        # The ring still holds what a child sees, which begins as many tokens before as are decoded at once.
        num_behind = parent.num_computed_tokens - parent.num_prompt_tokens
        is_at_end_of_prompt = 0 <= num_behind < self._decode_len
        forked = []
        for child in self.waiting.pop(parent):
            has_cache = is_at_end_of_prompt and self._allocations.fork(parent, child, num_tokens)
            if has_cache:
                child.num_computed_tokens = num_tokens
            forked.append((child, has_cache))
        return forked
