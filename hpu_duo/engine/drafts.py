"""Draft tokens (speculation): proposed for decodes, verified by the step's own sampling, accepted or rolled
back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hpu_duo.engine.samples import LiveSamples
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.engine.telemetry import StepCounters
from hpu_duo.request import Request

_log = logging.getLogger(__name__)

Propose: TypeAlias = Callable[[Request, int], Sequence[int]]
"""Returns the drafts of a decode, at most so many."""


class Drafter(Protocol):
    """Guesses the next tokens of requests that decode.

    Outputs do not depend on it: a draft is accepted only if it is the token that is sampled there anyway.
    """

    def propose(self, request: Request, most: int) -> Sequence[int] | NDArray[np.integer]:
        """Return the likely next tokens of a request, at most ``most`` of them, or none.

        Called between steps, for each decode that a step has room for. ``request.tokens`` up to
        ``request.num_tokens`` are its prompt and output; nothing of the request may be changed.
        """
        ...


class Drafting:
    """Drafts of a drafter, as far as the outputs of requests may go on with them.

    Args:
        drafter: proposes tokens; one that raises an error is not called again.
        samples: the samples of all requests.
        vocab_size: tokens lie below it.

    Attributes:
        drafter: as given.
    """

    def __init__(self, drafter: Drafter, samples: LiveSamples, vocab_size: int) -> None:
        self.drafter, self._samples, self._vocab_size = drafter, samples, vocab_size
        self._has_failed = False

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return drafts of a request that its output may begin with and that do not end it."""
        state = self._samples.get(request.request_id)
        if self._has_failed or state is None:
            return ()
        try:
            drafts = np.asarray(self.drafter.propose(request, most), np.int64)[:most].tolist()
        except Exception:  # of a user's code
            self._has_failed = True
            _log.exception("the drafter has failed: tokens are decoded one by one from now on")
            return ()
        is_token = [0 <= token < self._vocab_size for token in drafts]
        try:
            return state.cut_drafts(drafts[: is_token.index(False)] if False in is_token else drafts)
        except Exception:
            # The text or grammar of this request fails. Without drafts it goes on, and if it samples such a
            # token, the same error ends it by name.
            return ()


def num_verified(
    plan: StepPlan,
    token_ids: NDArray[np.int32],
    errors: Mapping[int, tuple[int, Exception]],
    counters: StepCounters,
) -> list[int]:
    """Return the number of accepted tokens of each of ``plan.sampled_rows``.

    Sampled tokens are accepted up to the first one that differs from its draft: later ones follow a wrong
    token. Forced tokens are drafts that never differ.

    Args:
        token_ids: ``num_samples`` for each of these rows, row after row.
        errors: first of these that is undefined, by ring row.
        counters: counts drafts, but for forced tokens.
    """
    accepted, end = [], 0
    for row in plan.sampled_rows:
        begin, end = end, end + row.num_samples
        num_drafts, num_taken, request = row.num_samples - 1, 1, row.request
        if num_drafts:
            differs = request.tokens[row.end - num_drafts : row.end] != token_ids[begin : end - 1]
            num_taken += int(differs.argmax()) if differs.any() else num_drafts
            if row.ring_row in errors:
                num_taken = max(1, min(num_taken, errors[row.ring_row][0]))
            if request.num_output_tokens >= len(request.params.forced_token_ids):
                counters.num_drafted_tokens += num_drafts
                counters.num_accepted_tokens += num_taken - 1
        accepted.append(num_taken)
    return accepted
