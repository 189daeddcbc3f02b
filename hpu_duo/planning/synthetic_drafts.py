"""Drafts of a stated acceptance for simulated engines, which have no text to draft from."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Sized

from hpu_duo.engine.draft_gain import DraftLengths
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.request import Request


class SyntheticDrafts:
    """Proposes as many drafts as there is room for, of which as many are accepted as is stated.

    Args:
        lens: tokens of a row, see ``StepLimits.draft_lens``.
        acceptance_length: mean tokens of a verified row, 1 or more, if its draft is long enough.
        seed: of the draws.
    """

    def __init__(self, lens: Sequence[int], acceptance_length: float, seed: int = 0) -> None:
        self._lengths, self._rng = DraftLengths(lens), random.Random(seed)
        self._accepted = acceptance_length - 1

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return drafts, whose tokens say nothing."""
        return () if self._lengths.pauses(request) else [0] * most

    def choose(self, found: Mapping[Request, Sized], num_rows: int, longest: int) -> int:
        """Return the tokens of a row, as an engine chooses them."""
        return self._lengths.choose({request: len(drafts) for request, drafts in found.items()}, num_rows)

    def skip(self, reason: str) -> None:
        """Do nothing."""

    def num_accepted(self, plan: StepPlan) -> list[int]:
        """Draw the accepted tokens of each of ``plan.sampled_rows``."""
        found = []
        for row in plan.sampled_rows:
            num_drafts, whole = row.num_samples - 1, int(self._accepted)
            num_right = min(num_drafts, whole + (self._rng.random() < self._accepted - whole))
            if num_drafts:
                self._lengths.verified(row.request, num_drafts, num_right)
            found.append(1 + num_right)
        return found

    def ran(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        """Note a step and its tokens."""
        if plan.num_samples and plan.rows[-1].num_new_tokens <= plan.decode_len:
            self._lengths.ran(len(plan.rows), plan.decode_len, num_tokens, seconds)
        for row in plan.rows:
            if row.request.is_finished:
                self._lengths.end(row.request)
