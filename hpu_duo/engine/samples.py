"""Host states of the samples that have not ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hpu_duo.engine.outputs import Completion, ContinuationScore, RequestOutput, TokenLogprob
from hpu_duo.engine.step_plan import CommittedToken
from hpu_duo.request import FinishReason, Request, token_array
from hpu_duo.sampling import (
    IncrementalDetokenizer,
    PenaltyState,
    Released,
    SamplingParams,
    SamplingRow,
    StopChecker,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.sampling.guidance import GrammarState


class SampleState:
    """State of one sample besides its ``Request``: penalties, grammar, text, stop strings."""

    def __init__(
        self,
        request: Request,
        public_id: str,
        eos_token_ids: tuple[int, ...],
        tokenizer: PreTrainedTokenizerBase | None,
        special_ids: frozenset[int] | None = None,
        grammar: GrammarState | None = None,
        byte_of: Mapping[int, int] | None = None,
    ) -> None:
        params = request.params
        self.request = request
        self.public_id = public_id
        self.penalties = PenaltyState.from_token_ids(params, request.prompt_token_ids.tolist())
        self._eos = eos_token_ids
        self._stop = StopChecker(params, _text_before(request, tokenizer)) if params.stop else None
        self._ahead: StopChecker | None = None
        # Of a buffered run of byte tokens: its whole characters, and special tokens with their place among
        # these.
        self._num_coming = 0
        self._within: list[tuple[int, str]] = []
        self._grammar = grammar
        self._host = None if params.host_sampler is None else params.host_sampler(request.sample_index)
        self._text = None
        if tokenizer is not None:
            context = request.prompt_token_ids[-32:].tolist()
            self._text = IncrementalDetokenizer(
                tokenizer, params.skip_special_tokens, context, special_ids, byte_of
            )

    def sampling_row(self) -> SamplingRow:
        """Return the sampling of the next token."""
        request, choose = self.request, None
        if self._host is not None and self._host.chooses:
            choose = partial(self._host.choose, request.output_token_ids)
        place = request.num_output_tokens
        # Forced tokens were checked against the grammar when the request was added.
        is_forced = place < len(request.params.forced_token_ids)
        return SamplingRow(
            request.params,
            request.sampling_seed,
            place,
            self.penalties,
            self._eos,
            choose,
            None if is_forced else self._grammar,
        )

    def sampling_rows(self, num_samples: int) -> list[SamplingRow]:
        """Return the sampling of the next token, and of those behind each of ``num_samples - 1`` drafts.

        Each is computed as if all previous drafts were accepted. Forced tokens need no more than the number
        of their draw, since no penalty weighs them.
        """
        request, rows = self.request, [self.sampling_row()]
        params, place, grammar = request.params, request.num_output_tokens, rows[0].grammar
        is_forced = place < len(params.forced_token_ids)
        counts = None if self.penalties is None or is_forced else self.penalties.counts
        drafts = request.tokens[request.num_tokens : request.num_tokens + num_samples - 1].tolist()
        for number, token in enumerate(drafts, place + 1):
            if counts is not None:
                counts = counts.behind(token)
            if grammar is not None:
                grammar = grammar.fork()
                grammar.accept(token)
            penalties = self.penalties if counts is None else counts
            rows.append(rows[0]._replace(num_output_tokens=number, penalties=penalties, grammar=grammar))
        return rows

    def cut_drafts(self, drafts: list[int]) -> list[int]:
        """Return the leading drafts that the output may go on with, and that do not end it.

        The token that ends it is sampled behind them in the same step, so it is never in front of another.
        """
        request, place = self.request, self.request.num_output_tokens
        grammar = None if self._grammar is None else self._grammar.fork()
        ahead = None if self._stop is None else self._fork_text()
        for number, token in enumerate(drafts):
            num_tokens = place + number + 1
            ends = token in request.stop_tokens and num_tokens >= request.params.min_tokens
            if ends or (grammar is not None and not _goes_on(grammar, token)):
                return drafts[:number]
            if ahead is not None and ahead._push(token, num_tokens, None, shows=True)[1] is not None:
                return drafts[:number]
        return drafts

    @property
    def takes_model_drafts(self) -> bool:
        """Whether tokens may be sampled behind drafts that the host does not know yet.

        Penalties and grammars depend on them.
        """
        return self.penalties is None and self._grammar is None

    def _fork_text(self) -> SampleState:
        """Return a state whose text goes on from here."""
        ahead = copy(self)
        ahead._text = None if self._text is None else self._text.fork()
        ahead._stop = None if self._stop is None else self._stop.fork()
        ahead._ahead = None if self._ahead is None else self._ahead.fork()
        ahead._within = [*self._within]
        return ahead

    def take(self, committed: CommittedToken, logprob: TokenLogprob | None) -> RequestOutput:
        """Process a sampled token; the output has the finish reason, by token or by text."""
        request, token, reason, number, _ = committed
        # Further tokens of the same step are appended to the request already.
        outputs = request.output_token_ids[: number + 1]
        if self.penalties is not None:
            self.penalties.append(token)
        stop_reason: str | int | None = None
        if reason is FinishReason.STOP and token in request.params.stop_token_ids:
            stop_reason = token
        shows = reason is not FinishReason.STOP or request.params.include_stop_str_in_output
        is_watched = self._grammar is not None or self._host is not None
        if is_watched and self._ends(token, outputs, reason):
            reason = FinishReason.STOP
        text, match = self._push(token, len(outputs), reason, shows)
        if match is not None:
            reason, stop_reason = FinishReason.STOP, match
        return RequestOutput(
            request_id=self.public_id,
            sample_index=request.sample_index,
            token_ids=(token,),
            text=text,
            logprobs=() if logprob is None else (logprob,),
            finish_reason=reason,
            stop_reason=stop_reason,
            admitted_at=(request.parent or request).admitted_at if len(outputs) == 1 else None,
            num_cached_tokens=request.num_cached_tokens or 0,
        )

    def _ends(self, token: int, outputs: npt.NDArray[np.int32], reason: FinishReason | None) -> bool:
        """Return the finish reason of the sample, those of its text included."""
        if reason is FinishReason.STOP:
            return False
        if self._grammar is not None:
            self._grammar.accept(token)
            # An output that is complete with its last token is not truncated by its length.
            if self._grammar.is_complete:
                return True
        return reason is None and self._host is not None and self._host.ends(outputs)

    def abort(self) -> RequestOutput:
        """Return the last output of an aborted sample."""
        return RequestOutput(self.public_id, self.request.sample_index, (), finish_reason=FinishReason.ABORT)

    def fail(self, error: Exception) -> RequestOutput:
        """Return the last output of a sample that ended by an error."""
        index = self.request.sample_index
        return RequestOutput(self.public_id, index, (), finish_reason=FinishReason.ERROR, error=error)

    def _push(
        self, token: int, num_tokens: int, reason: FinishReason | None, shows: bool
    ) -> tuple[str, str | None]:
        """Return the text that is final now, and the stop string that it completes."""
        if self._text is None:
            return "", None
        text = self._text.push(token) if shows else ""
        skipped = self._text.skipped_text(token) if shows and self._stop is not None else ""
        if reason is not None or (
            self._stop is not None and self._stops_ahead(self._stop, self._text.coming, skipped, num_tokens)
        ):
            text += self._text.flush()
        if self._stop is None:
            return text, None
        released = Released("", None)
        for piece, is_hidden in self._in_order(text, skipped):
            if piece and released.match is None:
                more = self._stop.push(piece, num_tokens, is_hidden=is_hidden)
                released = Released(released.text + more.text, more.match)
        if released.match is not None:
            return released.text, released.match.stop
        return released.text + (self._stop.flush() if reason is not None else ""), None

    def _in_order(self, text: str, skipped: str) -> list[tuple[str, bool]]:
        """Yield texts in order of their tokens, and whether they are hidden; buffered bytes come late."""
        assert self._text is not None
        self._num_coming += len(self._text.coming)
        if skipped and not text and self._num_coming:
            self._within.append((self._num_coming, skipped))
            skipped = ""
        pieces: list[tuple[str, bool]] = []
        at = 0
        if text:
            for place, hidden in self._within:
                pieces += [(text[at:place], False), (hidden, True)]
                at = place
            self._ahead, self._num_coming, self._within = None, 0, []
        return [*pieces, (text[at:], False), (skipped, True)]

    def _stops_ahead(self, stop: StopChecker, coming: str, skipped: str, num_tokens: int) -> bool:
        """Whether characters that the detokenizer still buffers complete a stop string."""
        if not (coming or (skipped and self._ahead is not None)):
            return False
        if self._ahead is None:
            self._ahead = stop.fork()
        if self._ahead.push(coming, num_tokens).match is not None:
            return True
        return self._ahead.push(skipped, num_tokens, is_hidden=True).match is not None


class LiveSamples:
    """States of the samples that have not ended, by their own ids and by public request ids."""

    def __init__(self) -> None:
        self._states: dict[str, SampleState] = {}
        self._names: dict[str, list[str]] = {}

    def add(self, request_id: str, states: Sequence[SampleState]) -> None:
        """Add all samples of a request."""
        self._names[request_id] = [state.request.request_id for state in states]
        self._states.update((state.request.request_id, state) for state in states)

    def remove(self, name: str) -> None:
        """Remove a sample, and its request with the last of them."""
        request_id = self._states.pop(name).public_id
        self._names[request_id].remove(name)
        if not self._names[request_id]:
            del self._names[request_id]

    def get(self, name: str) -> SampleState | None:
        """The state of a sample, None when it has ended."""
        return self._states.get(name)

    def __getitem__(self, name: str) -> SampleState:
        return self._states[name]

    def of(self, request_id: str) -> list[SampleState]:
        """Samples of a request that have not ended, in order; none for an unknown one."""
        return [self._states[name] for name in self._names.get(request_id, ())]

    def is_live(self, request_id: str) -> bool:
        """Whether a request has samples that have not ended."""
        return request_id in self._names

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[SampleState]:
        return iter(self._states.values())


def _goes_on(grammar: GrammarState, token: int) -> bool:
    """Let a grammar go on by a token; returns whether it allows the token, and others behind it."""
    try:
        grammar.accept(token)
    except ValueError:
        return False
    return not grammar.is_complete


def _text_before(request: Request, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the end of the prompt's text, where a stop string may begin."""
    params = request.params
    if tokenizer is None or not params.stop_like_transformers:
        return ""
    # A character has at most four tokens.
    num_tokens = 4 * max(map(len, params.stop))
    last = request.prompt_token_ids[-num_tokens:].tolist()
    return str(tokenizer.decode(last, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def forced(tokens: Sequence[int] | np.ndarray) -> SamplingParams:
    """Return parameters that force exactly these tokens, with log-probabilities.

    Raises:
        ValueError: not a list of one or more integers.
    """
    token_ids = token_array("continuation", tokens)
    if token_ids.ndim != 1 or token_ids.size == 0 or token_ids.dtype.kind not in "iu":
        raise ValueError(
            f"expected a continuation of one or more token ids, got {token_ids.dtype} {token_ids.shape}"
        )
    return SamplingParams(
        temperature=0.0,
        logprobs=1,
        max_tokens=len(token_ids),
        ignore_eos=True,
        forced_token_ids=tuple(token_ids.tolist()),
        decoded_prompt_tokens=1,
    )


def score_of(sample: Completion) -> ContinuationScore:
    """Return the score of a decoded continuation."""
    return ContinuationScore(
        tuple(one.logprob for one in sample.logprobs),
        tuple(one.token_id in one.top for one in sample.logprobs),
    )
