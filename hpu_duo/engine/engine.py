"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from graphs.interrupts import Deferral, interrupts_deferred
from hpu_duo.engine.intake import Intake, Prompt
from hpu_duo.engine.live_samples import LiveSamples
from hpu_duo.engine.outputs import (
    Completion,
    Completions,
    ContinuationScore,
    RequestOutput,
    TokenLogprob,
    logprobs_by_request,
)
from hpu_duo.engine.runner import Runner, StepResult
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.scoring import forced, score_of
from hpu_duo.engine.stats import EngineStats, StepCounters
from hpu_duo.engine.step_plan import CommittedToken, StepPlan
from hpu_duo.engine.turns import Turns
from hpu_duo.request import FinishReason, Request, TokenLimits
from hpu_duo.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from graphs.recording import ShapeRecorder


class Engine:
    """Serves requests: ``add_request``, then ``step`` until ``has_unfinished`` is False.

    A request that cannot be served is refused by ``add_request`` before anything changes, so the
    others go on.

    Any thread may call any method at any time. One step runs at a time and serves the requests of all
    threads, so concurrent calls of ``generate`` are batched together; threads take turns, and each gets the
    outputs of its own requests. Callbacks run between steps and may call every method too. Requests without
    a seed get one by order of arrival, which threads leave to chance.

    Args:
        runner: the device side.
        scheduler: who runs when.
        limits: what the model says about tokens.
        tokenizer: for text and stop strings; without it outputs carry token ids only.
        seed: from which requests without a seed get theirs.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        limits: TokenLimits,
        tokenizer: PreTrainedTokenizerBase | None = None,
        seed: int = 0,
    ) -> None:
        self.runner, self.scheduler, self.limits, self.tokenizer = runner, scheduler, limits, tokenizer
        self._intake = Intake(limits, tokenizer, seed)
        self._turns = Turns()
        self._num_added = 0
        self._is_running = False
        self._samples = LiveSamples()
        self._calls: dict[str, Completions] = {}
        self._unreported: list[RequestOutput] = []
        self._uncollected: deque[tuple[CommittedToken, TokenLogprob | None]] = deque()
        self._counters = StepCounters()
        self.recorder: ShapeRecorder | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether another ``step`` has something to do or to report, requests of all threads included."""
        return self.scheduler.has_unfinished or bool(self._unreported) or bool(self._uncollected)

    def add_request(
        self, prompt_token_ids: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a prompt; returns its id.

        Raises:
            ValueError: the prompt is empty, too long for the model or the cache, or has tokens outside
                the vocabulary; the id is in use; parameters do not fit the model.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params: expected SamplingParams or None, got {type(params).__name__}")
        return self._add(prompt_token_ids, [params] * params.n, request_id)

    def _add(self, prompt_token_ids: Prompt, each: Sequence[SamplingParams], request_id: str | None) -> str:
        """Queue the samples of one prompt, with parameters of their own."""
        with interrupts_deferred(), self._turns:
            public_id = self._samples.free_id(self._num_added) if request_id is None else request_id
            if self._samples.is_live(public_id) or public_id in self._calls:
                raise ValueError(f"request id {public_id!r} is in use by an unfinished request")
            requests = self._intake.requests(public_id, self._num_added, prompt_token_ids, each)
            # Everything that may fail comes before anything changes.
            states = self._intake.states(public_id, requests)
            for request in requests:
                self.scheduler.add(request)
            self._num_added += 1
            self._samples.add(public_id, states)
        return public_id

    def abort(self, request_id: str) -> bool:
        """End all samples of a request early; False if no unfinished request has this id.

        The next ``step`` reports an output with finish reason ``abort`` for each, or the ``generate`` that
        they belong to.
        """
        with interrupts_deferred(), self._turns:
            states = self._samples.of(request_id)
            for state in states:
                self.scheduler.abort(state.request.request_id)
                self._samples.remove(state.request.request_id)
                self._report(state.abort())
        return bool(states)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns what it added to each request.

        Requests of a ``generate`` that is under way are served too, and reported there.

        If the step fails, what was raised goes on to the caller, and the requests compute their tokens anew
        in the next step. If a sampled token cannot be turned into text, its request ends as aborted. Outputs
        that could not be returned then come with the next step.
        """
        outputs: list[RequestOutput] = []
        try:
            with interrupts_deferred() as deferral, self._turns:
                self._advance(deferral)
                # Swapped at once, so that an interruption finds every output in one place or the other.
                outputs, self._unreported = self._unreported, outputs
            return outputs
        except BaseException:
            with interrupts_deferred(), self._turns:
                self._unreported = outputs + self._unreported
            raise

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep the steps of other threads waiting meanwhile."""
        with interrupts_deferred() as deferral, self._turns, deferral.lifted():
            yield

    def _advance(self, deferral: Deferral) -> None:
        """Run one step; what it adds to requests is put where it will be reported.

        To be called with interrupts deferred, and while no other thread may touch anything. Only the run of
        the device can be interrupted.
        """
        if self._is_running:
            raise RuntimeError("expected no step to be asked for by what a step runs, got one in another")
        began = time.perf_counter()
        # Tokens that a failed step had sampled, and its plan if it was not committed.
        self._collect()
        self.scheduler.discard()
        plan = self.scheduler.plan()
        if plan is None:
            return
        sampling = {
            row.ring_row: self._samples[row.request.request_id].sampling_row() for row in plan.sampled_rows
        }
        planned = time.perf_counter()
        self._is_running = True
        try:
            with deferral.lifted():
                result = self.runner.run(plan, sampling, self._intake.vocab_size)
        finally:
            self._is_running = False
        ran = time.perf_counter()
        self._take(plan, result)
        self._collect()
        self._counters.host_s += time.perf_counter() - began - (ran - planned) + result.build_s
        self._counters.device_s += ran - planned - result.build_s

    def _take(self, plan: StepPlan, result: StepResult) -> None:
        """Commit a step that has run; what it sampled waits to be collected."""
        logprobs = logprobs_by_request(plan, result)
        if self.recorder is not None:
            self.recorder.add(result.shape)
        self._counters.count(plan, result, self.scheduler.leases, self.runner.store.plan)
        for committed in self.scheduler.commit(plan, result.token_ids):
            self._uncollected.append((committed, logprobs.get(committed.request.request_id)))

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[list[Completion]]:
        """Serve prompts to the end; returns the ``n`` samples of each, in order of the prompts.

        Nothing is left behind when a prompt is refused or the loop is interrupted: requests of this
        call that are still running are aborted.

        Args:
            params: one for all prompts, or one each.
            on_output: called with each output of this call as it comes, between steps; it may call any
                method. What a step adds to other requests meanwhile is reported by the next ``step``.
        """
        prompts = list(prompts)
        each = (
            [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        )
        if len(each) != len(prompts):
            raise ValueError(f"expected one SamplingParams per prompt, got {len(each)} for {len(prompts)}")
        waiting = deque(partial(self.add_request, prompt, one) for prompt, one in zip(prompts, each))
        return self._serve(waiting, on_output)

    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Sequence[Prompt]],
    ) -> list[list[ContinuationScore]]:
        """How likely given continuations are, found by decoding them.

        Each prompt is prefilled but for its last token. That one and the continuation are then decoded one
        token per step, whatever the model says, so every probability comes from a decode that reads the
        cache as generation would; what a head pattern leaves out of the cache is missing here too.
        Continuations of one prompt share its prefill when there are at least as many rows as continuations.

        Args:
            prompts: token ids, at least one each.
            continuations: for each prompt the continuations to score, each of at least one token.

        Returns:
            For each prompt the scores of its continuations, in order.

        Raises:
            ValueError: the numbers differ, a prompt or continuation is empty, has tokens outside the
                vocabulary, or is too long for the model. Nothing of this call is left behind.
        """
        if len(prompts) != len(continuations):
            raise ValueError(
                f"expected continuations for each of {len(prompts)} prompts, got {len(continuations)}"
            )
        asked = [[forced(tokens) for tokens in each] for each in continuations]
        for number, each in enumerate(asked):
            if not each:
                raise ValueError(f"prompt {number}: expected at least one continuation, got none")
            # Refuses what it would refuse later, when others have run.
            self._intake.requests(f"prompt {number}", 0, prompts[number], each)
        waiting = deque(partial(self._add, prompt, each, None) for prompt, each in zip(prompts, asked))
        done = self._serve(waiting, None, [len(each) for each in asked])
        return [[score_of(sample) for sample in samples] for samples in done]

    def _serve(
        self,
        waiting: deque[partial[str]],
        on_output: Callable[[RequestOutput], None] | None,
        widths: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """Add requests and step until they have ended.

        Args:
            widths: samples of each request, to add one only when all of them find a row, for then they can
                fork; None adds all at once.
        """
        call = Completions(on_output)
        try:
            while (outputs := self._outputs_of(call, waiting, widths)) is not None:
                call.add(outputs)
        finally:
            with interrupts_deferred(), self._turns:
                for request_id in call:
                    self.abort(request_id)
                    del self._calls[request_id]
        return call.in_order()

    def _outputs_of(
        self, call: Completions, waiting: deque[partial[str]], widths: Sequence[int] | None
    ) -> list[RequestOutput] | None:
        """What the requests of a call have got, after a step if that is nothing; None when all have ended."""
        with interrupts_deferred() as deferral, self._turns:
            while waiting and self._has_rows(None if widths is None else widths[len(call)]):
                request_id = waiting.popleft()()
                call.expect(request_id)
                self._calls[request_id] = call
            if not call.mail:
                if not waiting and not any(map(self._samples.is_live, call)):
                    return None
                self._advance(deferral)
            return call.take_mail()

    def stats(self) -> EngineStats:
        """A snapshot of what has been done and what is held."""
        with interrupts_deferred(), self._turns:
            return EngineStats.of(self._counters, self.scheduler, self.runner)

    def _has_rows(self, wanted: int | None) -> bool:
        """Whether so many more samples could run now; one alone is never kept waiting."""
        taken = len(self._samples)
        return wanted is None or not taken or taken + wanted <= self.runner.store.plan.max_num_seqs

    def _collect(self) -> None:
        """Turn sampled tokens into outputs, one by one, so that an interruption loses none of the others."""
        while self._uncollected:
            committed, logprob = self._uncollected.popleft()
            request = committed.request
            state = self._samples.get(request.request_id)
            if state is None:
                continue  # aborted before its token was collected
            try:
                output = state.take(committed, logprob)
            except BaseException:
                self._end(request, FinishReason.ABORT)
                self._report(state.abort())
                raise
            if output.finish_reason is not None:
                self._end(request, output.finish_reason)
            self._report(output)

    def _report(self, output: RequestOutput) -> None:
        """Put an output where the caller that it is for will find it."""
        call = self._calls.get(output.request_id)
        (self._unreported if call is None else call.mail).append(output)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if not request.is_finished:
            self.scheduler.finish(request, reason)
        self._samples.remove(request.request_id)
