"""Draft tokens (speculation): proposed for decodes, verified by the step's own sampling, accepted or rolled
back."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpu_duo.drafting import Drafter, PredictedOutput
from hpu_duo.drafting.draft_gain import DraftLengths
from hpu_duo.engine.model_drafts.tables import drafts_of
from hpu_duo.engine.samples import LiveSamples, SampleState
from hpu_duo.engine.step_plan import FROM_DEVICE, StepPlan
from hpu_duo.request import Request

_log = logging.getLogger(__name__)

_TOKENS_A_STEP = 4096
"""Tokens of prompts that a drafter gets in a step: further ones follow in the next steps."""

ON_THE_HOST = (
    "requests whose tokens are sampled on the host (logits processors, scores, functions of the caller) take "
    "no drafts"
)


class MakesDrafts(Protocol):
    """Interface of drafters to the scheduler."""

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return the drafts of a decode, at most so many."""
        ...

    def choose(self, found: Mapping[Request, Any], num_rows: int, longest: int) -> int:
        """Return the most tokens of a row of the step, at most ``longest``, from the drafts of its rows."""
        ...

    def skip(self, reason: str) -> None:
        """Note a step that may have no drafts."""
        ...


@dataclass(frozen=True)
class SpeculationStats:
    """Statistics of drafts; forced tokens are none.

    Attributes:
        num_drafts: rows of steps that verified drafts.
        num_draft_tokens, num_accepted_tokens: their draft tokens, and those that were sampled too.
        num_accepted_tokens_per_pos: accepted tokens by their place in the draft.
        num_steps: steps that verified drafts.
        num_steps_without: the other ones, by reason: "prompts" (the step has prompts too), "none proposed"
            (or their requests pause), "few expected" (it was expected to cost more than it saves).
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_steps: int = 0
    num_steps_without: Mapping[str, int] = field(default_factory=dict)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens of a verified row: ``1 + num_accepted_tokens / num_drafts``."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)


class SpeculationCounters:
    """Running totals of drafts."""

    def __init__(self) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_steps = 0
        self._accepted: Counter[int] = Counter()
        self.without: Counter[str] = Counter()

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Count a verified row."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self._accepted.update(range(num_accepted))

    def stats(self) -> SpeculationStats:
        """Return a snapshot."""
        per_place = tuple(self._accepted[place] for place in range(max(self._accepted, default=-1) + 1))
        return SpeculationStats(
            self.num_drafts,
            self.num_draft_tokens,
            sum(per_place),
            per_place,
            self.num_steps,
            dict(self.without),
        )


class Drafting:
    """Drafts of a drafter, as far as the outputs of requests may go on with them.

    A request with a predicted output takes its drafts from that while the output follows it.

    Args:
        drafter: proposes tokens; one that raises an error is not called again.
        samples: the samples of all requests.
        vocab_size: tokens lie below it.
        counters: of verified drafts.
        lens: sizes of rows to choose from, see ``StepLimits.draft_lens``; () verifies all drafts.
        num_model_drafts: drafts that a model makes where the drafter proposes few; 0 = no model drafts.
        can_begin: whether the model can draft for a request in the next step; None = it always can.

    Attributes:
        drafter, counters: as given.
        has_host_rows: whether a request took no drafts because its tokens were sampled on the host.
    """

    def __init__(
        self,
        drafter: Drafter,
        samples: LiveSamples,
        vocab_size: int,
        counters: SpeculationCounters,
        lens: Sequence[int] = (),
        num_model_drafts: int = 0,
        can_begin: Callable[[Request], bool] | None = None,
    ) -> None:
        self.drafter, self._samples, self._vocab_size = drafter, samples, vocab_size
        self._num_model_drafts, self._can_begin = num_model_drafts, can_begin
        self.counters = counters
        self._has_failed = self.has_host_rows = False
        self._lengths = DraftLengths(lens) if lens else None
        self._num_known: dict[Request, int] = {}
        self._predicted: dict[Request, PredictedOutput] = {}
        self._follows: set[Request] = set()
        # Drafts of text that no step verifies, and where they begin: whether they are right shows later.
        self._watched: dict[Request, tuple[int, Sequence[int]]] = {}
        self._num_left = _TOKENS_A_STEP

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return drafts of a request that its output may begin with and that do not end it.

        Drafts of a model are ``FROM_DEVICE``.
        """
        state, lengths = self._samples.get(request.request_id), self._lengths
        if request in self._watched:
            self._settle(request)
        if state is None or (lengths is not None and lengths.pauses(request)):
            return ()
        drafts = () if self._has_failed else self._of_text(request, state, most)
        num = min(self._num_model_drafts, most)
        if not num or not state.takes_model_drafts:
            return drafts
        if self._can_begin is not None and not self._can_begin(request):
            return drafts
        if 2 * len(drafts) < num or (
            lengths is not None and lengths.prefers_model(request, len(drafts), num)
        ):
            self._watch(request, drafts)
            return [FROM_DEVICE] * num
        return drafts

    def _watch(self, request: Request, drafts: Sequence[int]) -> None:
        if drafts and self._lengths is not None and drafts[0] != FROM_DEVICE:
            self._watched.setdefault(request, (request.num_tokens, drafts))

    def _settle(self, request: Request) -> None:
        """Note a draft that was not verified, once its first wrong token is known, or all of it."""
        start, drafts = self._watched[request]
        known = request.tokens[start : min(request.num_tokens, start + len(drafts))].tolist()
        right = next((n for n, token in enumerate(known) if token != drafts[n]), len(known))
        if right < len(known) or len(known) == len(drafts):
            del self._watched[request]
            if self._lengths is not None:
                self._lengths.verified(request, len(drafts), right)

    def _of_text(self, request: Request, state: SampleState, most: int) -> Sequence[int]:
        try:
            if not self._extend(request, request.num_tokens):
                return ()
            drafts = np.asarray(self._guess(request, most), np.int64)[:most].tolist()
        except Exception:  # of a user's code
            self._fail()
            return ()
        if not drafts:
            return ()
        is_token = [0 <= token < self._vocab_size for token in drafts]
        try:
            return state.cut_drafts(drafts[: is_token.index(False)] if False in is_token else drafts)
        except Exception:  # of a grammar or a tokenizer
            # The text or grammar of this request fails. Without drafts it goes on, and if it samples such a
            # token, the same error ends it by name.
            return ()

    def choose(self, found: Mapping[Request, Any], num_rows: int, longest: int) -> int:
        """Return the most tokens of a row of the step, at most ``longest``, from the drafts of its rows."""
        own = {request: len(drafts) for request, drafts in found.items() if not request.num_drafts}
        of_model = {request for request in own if found[request][0] == FROM_DEVICE}
        if not own:
            if num_rows:
                self.counters.without["none proposed"] += 1
            return longest
        given = [most for first, last, most in self.drafter.most_by_rows if first <= num_rows <= last]
        if given:
            chosen = 1 + given[0]
        else:
            chosen = longest if self._lengths is None else self._lengths.choose(own, num_rows, of_model)
        forced = max((len(drafts) for request, drafts in found.items() if request.num_drafts), default=0)
        longest = min(longest, max(chosen, 1 + forced))
        if longest > 1:
            self.counters.num_steps += 1
        else:
            self.counters.without["few expected"] += 1
            for request in own:
                self._watch(request, found[request])
        return longest

    def skip(self, reason: str) -> None:
        """Note a step that may have no drafts."""
        self.counters.without[reason] += 1

    def ran(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        """Note a step that was committed.

        Args:
            num_tokens: tokens that it has added.
            seconds: of the whole step.
        """
        if self._lengths is not None and plan.num_samples and plan.rows[-1].num_new_tokens <= plan.decode_len:
            has_chain = plan.has_model_drafts
            self._lengths.ran(len(plan.rows), plan.decode_len, num_tokens, seconds, has_chain)

    def _guess(self, request: Request, most: int) -> Sequence[int] | NDArray[np.integer]:
        if (predicted := self._predicted.get(request)) is not None:
            drafts = predicted.propose(request.output_token_ids, most)
            if drafts:
                self._follows.add(request)
                return drafts
            self._follows.discard(request)
        return self.drafter.propose(request, most)

    def _extend(self, request: Request, num_tokens: int) -> bool:
        """Let the drafter have the first tokens of a request; False if that takes further steps."""
        known = self._num_known.get(request)
        if known is None:
            self.drafter.begin(request)
            known = 0
            if request.params.prediction_token_ids:
                self._predicted[request] = PredictedOutput(request.params.prediction_token_ids)
        new = min(num_tokens - known, max(self._num_left, 0))
        if new > 0:
            self.drafter.extend(request, request.tokens[known : known + new])
            if known + new > request.num_prompt_tokens:
                self._num_left -= max(0, request.num_prompt_tokens - known)
            else:
                self._num_left -= new
        self._num_known[request] = known + max(new, 0)
        return self._num_known[request] == num_tokens

    def follow(self, plan: StepPlan) -> None:
        """Let the drafter have what a step has computed of prompts."""
        self._num_left = _TOKENS_A_STEP
        for row in reversed(plan.rows):
            if row.num_new_tokens <= plan.decode_len:
                return  # decodes come first
            request = row.request
            if request.is_finished or not request.takes_drafts or self._has_failed:
                continue
            try:
                self._extend(request, max(request.num_computed_tokens, self._num_known.get(request, 0)))
            except Exception:  # of a user's code
                self._fail()

    def num_before_end(self, request: Request, num_taken: int) -> int:
        """Return how many sampled tokens to take: none behind one that ends the output.

        Args:
            num_taken: sampled tokens, all but the last of which are drafts that were accepted.
        """
        state = self._samples.get(request.request_id)
        if state is None:
            return num_taken
        start = request.num_tokens
        try:
            return 1 + len(state.cut_drafts(request.tokens[start : start + num_taken - 1].tolist()))
        except Exception:  # of a tokenizer; the same token ends the request by name
            return 1

    def verified(self, request: Request, num_drafts: int, num_accepted: int, of_model: bool = False) -> None:
        """Count the drafts of a row that were verified.

        Args:
            of_model: whether a model made them.
        """
        self.counters.count(num_drafts, num_accepted)
        if self._lengths is not None:
            self._lengths.verified(request, num_drafts, num_accepted, of_model)
        if request in self._follows:
            predicted = self._predicted[request]
            predicted.num_accepted += num_accepted
            predicted.num_rejected += num_drafts - num_accepted

    def predicted_of(self, request: Request) -> tuple[int, int]:
        """Return how many tokens of a predicted output were accepted and rejected."""
        predicted = self._predicted.get(request)
        return (0, 0) if predicted is None else (predicted.num_accepted, predicted.num_rejected)

    def end(self, request: Request) -> None:
        """Free what belongs to a request that has ended."""
        self.has_host_rows |= request.params.host_sampler is not None
        self._predicted.pop(request, None)
        self._follows.discard(request)
        self._watched.pop(request, None)
        if self._lengths is not None:
            self._lengths.end(request)
        if self._num_known.pop(request, None) is not None and not self._has_failed:
            try:
                self.drafter.end(request)
            except Exception:  # of a user's code
                self._fail()

    def _fail(self) -> None:
        self._has_failed = True
        _log.exception("the drafter has failed: tokens are decoded one by one from now on")


def write_model_drafts(plan: StepPlan, drafted: NDArray[np.int32]) -> frozenset[int]:
    """Write drafts that were sampled on the device behind the known tokens of their rows.

    Args:
        drafted: int32 ``[g, N]``.

    Returns:
        The ring rows that have such drafts.
    """
    found = set()
    for row in plan.rows:
        if num_drafts := drafts_of(row):
            found.add(row.ring_row)
            row.request.tokens[row.start + 1 : row.end] = drafted[:num_drafts, row.ring_row]
    return frozenset(found)


def num_verified(
    plan: StepPlan,
    token_ids: NDArray[np.int32],
    errors: Mapping[int, tuple[int, Exception]],
    drafting: Drafting | None,
    drafted: Collection[int] = (),
) -> list[int]:
    """Return the number of accepted tokens of each of ``plan.sampled_rows``.

    Sampled tokens are accepted up to the first one that differs from its draft: later ones follow a wrong
    token. Forced tokens are drafts that never differ.

    Args:
        token_ids: ``num_samples`` for each of these rows, row after row.
        errors: first of these that is undefined, by ring row.
        drafting: counts drafts, but for forced tokens.
        drafted: ring rows whose drafts were not known before the step, so that they may end the output.
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
            if drafting is not None and row.ring_row in drafted:
                num_taken = drafting.num_before_end(request, num_taken)
            if drafting is not None and request.num_output_tokens >= len(request.params.forced_token_ids):
                drafting.verified(request, num_drafts, num_taken - 1, row.ring_row in drafted)
        accepted.append(num_taken)
    return accepted


def without_rejected(plan: StepPlan, num_accepted: Sequence[int]) -> StepPlan:
    """Return a plan without the drafts that were rejected.

    Args:
        num_accepted: accepted tokens of each of ``plan.sampled_rows``.
    """
    accepted = iter(num_accepted)
    rows = []
    for row in plan.rows:
        num_rejected = row.num_samples - next(accepted) if row.num_samples else 0
        rows.append(
            row
            if not num_rejected
            else row._replace(
                num_new_tokens=row.num_new_tokens - num_rejected, num_samples=row.num_samples - num_rejected
            )
        )
    return replace(plan, rows=tuple(rows))
