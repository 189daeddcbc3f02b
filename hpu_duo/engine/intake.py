"""The entry of an engine: validates prompts, queues requests, and serves blocking calls."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from graphs.interrupts import Deferral, interrupts_deferred
from hpu_duo.engine.outputs import Completion, Completions, FairLock, RequestOutput
from hpu_duo.engine.samples import SampleState
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.stepper import Stepper
from hpu_duo.extras import install_command
from hpu_duo.request import FinishReason, PrefixHold, Request, TokenLimits
from hpu_duo.sampling import (
    FieldError,
    SamplingParams,
    StructuredOutputs,
    byte_tokens,
    derive_seed,
    special_token_ids,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.sampling.guidance import Grammars, GrammarState
    from hpu_duo.scheduling.ranker import Ranker

Prompt = Sequence[int] | np.ndarray


class Intake:
    """Validates prompts and creates requests and sample states; stores neither.

    Args:
        limits: the model's limits of tokens.
        tokenizer: for text and stop strings; None for token ids only.
        seed: base of the seeds of requests without one.
        ranker: scores prompts; None = all scores are 0.
    """

    def __init__(
        self,
        limits: TokenLimits,
        tokenizer: PreTrainedTokenizerBase | None,
        seed: int,
        ranker: Ranker | None = None,
    ) -> None:
        assert limits.vocab_size is not None, "expected limits with the size of the vocabulary"
        self.vocab_size = limits.vocab_size
        self._limits, self._tokenizer, self._seed = limits, tokenizer, seed
        self.ranker = ranker
        # Configurations may name stop tokens outside the vocabulary, which are never sampled.
        self._eos = tuple(token for token in limits.eos_token_ids if token < limits.vocab_size)
        self._special_ids = None if tokenizer is None else special_token_ids(tokenizer)
        self._byte_of = None if tokenizer is None else byte_tokens(tokenizer)
        self._grammars: Grammars | None = None
        self._grammars_lock = Lock()

    def score(self, prompt: Prompt, each: Sequence[SamplingParams], name: str) -> float:
        """Validate and score a prompt; thread-safe; 0 without a ranker.

        Raises:
            ValueError: see ``requests``.
        """
        if self.ranker is None:
            return 0.0
        [first, *_] = self.requests("", 0, prompt, each, name)
        return self.ranker.score([first.prompt_token_ids])[0]

    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar of the output, and check forced tokens against it; thread-safe.

        Slow once for each grammar, so to be called outside steps.

        Raises:
            ValueError: it cannot be compiled, or forced tokens violate it; the message names the field.
        """
        if params.structured_outputs is None:
            return
        state = self._grammar(params.structured_outputs)
        num_taken = state.num_accepted_of(params.forced_token_ids)
        if num_taken < len(params.forced_token_ids):
            raise FieldError(
                "forced_token_ids",
                "expected forced tokens that structured_outputs allow, got token "
                f"{params.forced_token_ids[num_taken]} at place {num_taken}",
            )

    def _grammar(self, wanted: StructuredOutputs) -> GrammarState:
        """Return the grammar's state before the first token."""
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = self._make_grammars()
        return self._grammars.start(wanted)

    def _make_grammars(self) -> Grammars:
        if self._tokenizer is None:
            raise FieldError("structured_outputs", "expected a model with a tokenizer, got one without")
        if find_spec("llguidance") is None:
            raise FieldError(
                "structured_outputs",
                f"expected llguidance, which is not installed: {install_command('structured')}",
            )
        from hpu_duo.sampling.guidance import Grammars

        return Grammars(self._tokenizer, self.vocab_size, self._eos)

    def requests(
        self,
        request_id: str,
        number: int,
        prompt: Prompt,
        each: Sequence[SamplingParams],
        name: str | None = None,
    ) -> list[Request]:
        """Create a request for each sample of one prompt.

        Args:
            number: of the prompt, in order of arrival; part of the seed of requests without one.
            each: parameters of each sample.
            name: of the request in error messages; None is its id.

        Raises:
            ValueError: the prompt or the parameters do not fit the model, or stop strings have no tokenizer.
        """
        for params in each:
            params.validate(self.vocab_size)
            self.prepare(params)
        if any(params.stop for params in each) and self._tokenizer is None:
            raise ValueError("expected a model with a tokenizer for stop strings, got one without")
        seed = derive_seed(self._seed, number) if each[0].seed is None else each[0].seed
        first = Request(
            f"{request_id}#0",
            prompt,
            each[0],
            self._limits,
            sampling_seed=derive_seed(seed, 0),
            name=f"request {request_id!r}" if name is None else name,
        )
        siblings = [
            first.sibling(
                f"{request_id}#{index}",
                sample_index=index,
                sampling_seed=derive_seed(seed, index),
                params=params,
            )
            for index, params in enumerate(each[1:], start=1)
        ]
        return [first, *siblings]

    def states(self, request_id: str, requests: Sequence[Request]) -> list[SampleState]:
        """Create the engine's state of each sample."""
        return [
            SampleState(
                request,
                request_id,
                self._eos,
                self._tokenizer,
                self._special_ids,
                None if (wanted := request.params.structured_outputs) is None else self._grammar(wanted),
                self._byte_of,
            )
            for request in requests
        ]


class Entry:
    """Adds the samples of prompts to scheduler and stepper.

    Args:
        intake: creates the samples.
        scheduler: queues their requests.
        stepper: stores their states.
        turns: lock of the engine.
    """

    def __init__(self, intake: Intake, scheduler: Scheduler, stepper: Stepper, turns: FairLock) -> None:
        self._intake, self._scheduler, self._turns = intake, scheduler, turns
        self._samples, self._output_queue = stepper.samples, stepper.output_queue
        self._num_added = 0

    def add(
        self,
        prompt_token_ids: Prompt,
        each: Sequence[SamplingParams],
        request_id: str | None = None,
        name: str | None = None,
        score: float | None = None,
        context: PrefixHold | None = None,
        opens: PrefixHold | None = None,
    ) -> str:
        """Queue the samples of one prompt, with parameters of their own; returns the request's id.

        Args:
            request_id: default a new one.
            name: of the request in error messages.
            score: see ``Engine.rank``; None computes it here.
            context, opens: see ``Request``.

        Raises:
            ValueError: see ``Engine.add_request``.
        """
        for params in {id(one): one for one in each}.values():
            self._intake.prepare(params)
        if score is None:
            named = "the prompt" if request_id is None else f"request {request_id!r}"
            score = self._intake.score(prompt_token_ids, each, named if name is None else name)
        with interrupts_deferred(), self._turns:
            public_id = self._free_id() if request_id is None else request_id
            if self._is_in_use(public_id):
                raise ValueError(f"request id {public_id!r} is in use by an unfinished request")
            requests = self._intake.requests(public_id, self._num_added, prompt_token_ids, each, name)
            # All validation precedes the first change.
            states = self._intake.states(public_id, requests)
            self._scheduler.holding.sweep()
            for request in requests:
                request.score, request.context, request.opens = score, context, opens
                self._scheduler.check_fits(request)
            for request in requests:
                self._scheduler.add(request)
            self._num_added += 1
            self._samples.add(public_id, states)
        return public_id

    def _is_in_use(self, request_id: str) -> bool:
        return self._samples.is_live(request_id) or self._output_queue.is_expected(request_id)

    def _free_id(self) -> str:
        """Return an unused id, from the number of requests so far."""
        names = (f"request-{number}" for number in count(self._num_added))
        return next(name for name in names if not self._is_in_use(name))


Add: TypeAlias = Callable[[], str]
"""Adds a request to the engine, and returns its id."""


class Calls:
    """Serves blocking calls: adds their requests, runs steps until all have ended, and collects outputs.

    Several threads may call at a time; each step serves the requests of all. A call that ends early, by an
    error or an interrupt, aborts its requests.

    Args:
        stepper: runs the steps.
        turns: lock of the engine.
        max_num_seqs: samples that may run at a time.
    """

    def __init__(self, stepper: Stepper, turns: FairLock, max_num_seqs: int) -> None:
        self._stepper, self._turns, self._max_num_seqs = stepper, turns, max_num_seqs
        self._samples, self._output_queue = stepper.samples, stepper.output_queue

    def serve(
        self,
        waiting: deque[Add],
        on_output: Callable[[RequestOutput], None] | None,
        widths: Sequence[int] | None = None,
        *,
        raises: bool = True,
    ) -> list[list[Completion]]:
        """Add requests and step until they have ended; returns the samples of each.

        Args:
            waiting: functions that add one request each and return its id; removed as they are called.
            on_output: called with each output, between steps.
            widths: samples of each request. A request is added only when all of its samples find a row, so
                that they can fork; None adds all at once.
            raises: the error that ended a request, and end the others; False = serve them.
        """
        call = Completions(on_output, raises=raises)
        try:
            while (outputs := self._outputs_of(call, waiting, widths)) is not None:
                call.add(outputs)
        finally:
            with interrupts_deferred(), self._turns:
                for request_id in call:
                    self._stepper.abort(request_id)
                self._output_queue.end(call)
        return call.in_order()

    def _outputs_of(
        self, call: Completions, waiting: deque[Add], widths: Sequence[int] | None
    ) -> list[RequestOutput] | None:
        """Return the new outputs of a call, running a step if there are none; None once all have ended."""
        with interrupts_deferred() as deferral, self._turns:
            self._stepper.check_between_steps()
            while waiting and self._has_rows(None if widths is None else widths[len(call)]):
                request_id = waiting.popleft()()
                self._output_queue.expect(request_id, call)
            if not call.mail:
                if not waiting and not any(map(self._samples.is_live, call)):
                    return None
                self._advance_for(call, deferral)
            return call.take_mail()

    def _advance_for(self, call: Completions, deferral: Deferral) -> None:
        """Run one step; an error that a request of another call may have caused is not raised.

        If it occurs again, the requests run one by one, and each call raises the errors of its own requests.
        """
        try:
            self._stepper.advance(deferral)
        except Exception:
            if all(request_id in call for request_id in self._stepper.last_failed):
                raise

    def _has_rows(self, wanted: int | None) -> bool:
        """Whether rows are free for ``wanted`` more samples; True if there are no others, and for None."""
        taken = len(self._samples)
        return wanted is None or not taken or taken + wanted <= self._max_num_seqs


_log = logging.getLogger(__name__)


def warn_of_cuts(
    done: Iterable[Sequence[Completion]], params: Iterable[SamplingParams | None], max_model_len: int
) -> None:
    """Warn if outputs ended at ``max_model_len`` before a stop and before their ``max_tokens``.

    Their finish reason is ``length``, as in vLLM. Without ``max_tokens`` this is the expected end.

    Args:
        done: the samples of each prompt.
        params: of each prompt.
    """
    outputs = [list(samples) for samples in done]
    lacking = [
        one.max_tokens - len(sample.token_ids)
        for samples, one in zip(outputs, params)
        for sample in samples
        if one is not None and one.max_tokens is not None and sample.finish_reason is FinishReason.LENGTH
    ]
    cut = [num_tokens for num_tokens in lacking if num_tokens > 0]
    if cut:
        _log.warning(
            "%d of %d outputs ended at max_model_len=%d, up to %d tokens before the requested limit "
            "(finish_reason 'length'): load the model with a higher max_model_len, or request fewer tokens",
            len(cut),
            sum(map(len, outputs)),
            max_model_len,
            max(cut),
        )
