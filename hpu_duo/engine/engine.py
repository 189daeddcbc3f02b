"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from hpu_duo.engine.output_text import SampleState
from hpu_duo.engine.outputs import Completion, ContinuationScore, RequestOutput, TokenLogprob
from hpu_duo.engine.runner import Runner, StepResult
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.scoring import forced, score_of
from hpu_duo.engine.stats import EngineStats, StepCounters
from hpu_duo.engine.step_plan import CommittedToken, StepPlan
from hpu_duo.request import FinishReason, Request, TokenLimits
from hpu_duo.sampling import SamplingParams, derive_seed, special_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from graphs.recording import ShapeRecorder

Prompt = Sequence[int] | np.ndarray


class Engine:
    """Serves requests: ``add_request``, then ``step`` until ``has_unfinished`` is False.

    A request that cannot be served is refused by ``add_request`` before anything changes, so the
    others go on. Not thread-safe: one thread drives it.

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
        assert limits.vocab_size is not None, "the engine needs the size of the vocabulary"
        self.runner, self.scheduler, self.limits, self.tokenizer = runner, scheduler, limits, tokenizer
        self._vocab_size = limits.vocab_size
        self._seed = seed
        self._num_added = 0
        self._samples: dict[str, SampleState] = {}
        self._groups: dict[str, list[str]] = {}
        self._ended: list[RequestOutput] = []
        self._uncollected: deque[tuple[CommittedToken, TokenLogprob | None]] = deque()
        self._special_ids = None if tokenizer is None else special_token_ids(tokenizer)
        self._counters = StepCounters()
        self.recorder: ShapeRecorder | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether another ``step`` has something to do or to report."""
        return self.scheduler.has_unfinished or bool(self._ended) or bool(self._uncollected)

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
        for params in each:
            params.validate(self._vocab_size)
        if any(params.stop for params in each) and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model was loaded without one")
        public_id = self._free_id() if request_id is None else request_id
        if public_id in self._groups:
            raise ValueError(f"request id {public_id!r} is in use by an unfinished request")
        seed = derive_seed(self._seed, self._num_added) if each[0].seed is None else each[0].seed
        samples = self._make_samples(public_id, prompt_token_ids, each, seed)
        # Everything that may fail comes before anything changes.
        states = [self._state_of(sample, public_id) for sample in samples]
        self.scheduler.add(samples[0])
        for sibling in samples[1:]:
            self.scheduler.add(sibling)
        self._num_added += 1
        self._groups[public_id] = [sample.request_id for sample in samples]
        self._samples.update((state.request.request_id, state) for state in states)
        return public_id

    def abort(self, request_id: str) -> bool:
        """End all samples of a request early; False if no unfinished request has this id.

        The next ``step`` reports an output with finish reason ``abort`` for each.
        """
        names = list(self._groups.get(request_id, ()))
        for name in names:
            self.scheduler.abort(name)
            self._ended.append(self._samples[name].abort())
            self._forget(name)
        return bool(names)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns what it added to each request.

        If the step fails, what was raised goes on to the caller, and the requests compute their tokens anew
        in the next step. If a sampled token cannot be turned into text, its request ends as aborted. Outputs
        that could not be returned then come with the next step.
        """
        outputs, self._ended = self._ended, []
        try:
            # Tokens that an interrupted step had sampled.
            self._collect(outputs)
            self._run(outputs)
        except BaseException:
            self._ended = outputs + self._ended
            raise
        return outputs

    def _run(self, outputs: list[RequestOutput]) -> None:
        began = time.perf_counter()
        plan = None
        try:
            plan = self.scheduler.plan()
            if plan is None:
                return
            sampling = {
                row.ring_row: self._samples[row.request.request_id].sampling_row()
                for row in plan.sampled_rows
            }
            planned = time.perf_counter()
            result = self.runner.run(plan, sampling, self._vocab_size)
        except BaseException:
            if plan is not None:
                self.scheduler.discard(plan)
            raise
        ran = time.perf_counter()
        self._count(plan, result)
        if self.recorder is not None:
            self.recorder.add(result.shape)
        logprobs = _logprobs_by_request(plan, result)
        for committed in self.scheduler.commit(plan, result.token_ids):
            self._uncollected.append((committed, logprobs.get(committed.request.request_id)))
        self._collect(outputs)
        self._counters.host_s += time.perf_counter() - began - (ran - planned) + result.build_s
        self._counters.device_s += ran - planned - result.build_s

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
            on_output: called with each output of this call as it comes. What a step adds to other requests
                meanwhile is reported by the next ``step``.
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
            self._make_samples(f"prompt {number}", prompts[number], each, 0)
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
        done: dict[str, dict[int, Completion]] = {}
        others: list[RequestOutput] = []
        try:
            while waiting or any(request_id in self._groups for request_id in done):
                while waiting and self._has_rows(None if widths is None else widths[len(done)]):
                    done[waiting.popleft()()] = {}
                outputs = self.step()
                others += [output for output in outputs if output.request_id not in done]
                for output in outputs:
                    if output.request_id not in done:
                        continue
                    samples = done[output.request_id]
                    sample = samples.setdefault(
                        output.sample_index, Completion(output.request_id, output.sample_index)
                    )
                    sample.add(output)
                    if on_output is not None:
                        on_output(output)
        finally:
            for request_id in done:
                self.abort(request_id)
            self._ended = others + [output for output in self._ended if output.request_id not in done]
        return [[samples[index] for index in sorted(samples)] for samples in done.values()]

    def stats(self) -> EngineStats:
        """A snapshot of what has been done and what is held."""
        c, leases, memory = self._counters, self.scheduler.leases, self.runner.store.plan
        graphs = self.runner.graphs.counters
        return EngineStats(
            steps=dict(c.steps),
            num_prompt_tokens=c.num_prompt_tokens,
            num_output_tokens=c.num_output_tokens,
            num_padded_tokens=c.num_padded_tokens,
            num_query_tokens=c.num_query_tokens,
            num_preemptions=c.num_preemptions,
            num_graph_misses=graphs.misses,
            num_late_captures=graphs.late_captures,
            num_uncaptured_steps=graphs.bypasses,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            used_blocks=leases.blocks.num_used,
            total_blocks=memory.num_blocks if memory.uses_blocks else 0,
            used_rows=leases.rows.num_used,
            total_rows=memory.max_num_seqs,
            kv_bytes=self.runner.store.num_bytes,
            graph_bytes=memory.graph_bytes,
            held_bytes=self._held_bytes(),
            full_attention_bytes=memory.full_attention_bytes(self.scheduler.num_cached_tokens),
            peak_held_bytes=c.peak_held_bytes,
            peak_full_attention_bytes=c.peak_full_attention_bytes,
            host_s=c.host_s,
            device_s=c.device_s,
            bytes_copied=self.runner.inputs.bytes_copied,
        )

    def _free_id(self) -> str:
        names = (f"request-{number}" for number in count(self._num_added))
        return next(name for name in names if name not in self._groups)

    def _make_samples(
        self, public_id: str, prompt: Prompt, each: Sequence[SamplingParams], seed: int
    ) -> list[Request]:
        first = Request(f"{public_id}#0", prompt, each[0], self.limits, sampling_seed=derive_seed(seed, 0))
        siblings = [
            first.sibling(
                f"{public_id}#{index}",
                sample_index=index,
                sampling_seed=derive_seed(seed, index),
                params=params,
            )
            for index, params in enumerate(each[1:], start=1)
        ]
        return [first, *siblings]

    def _has_rows(self, wanted: int | None) -> bool:
        """Whether so many more samples could run now; one alone is never kept waiting."""
        taken = len(self._samples)
        return wanted is None or not taken or taken + wanted <= self.runner.store.plan.max_num_seqs

    def _state_of(self, sample: Request, public_id: str) -> SampleState:
        return SampleState(
            sample, public_id, tuple(self.limits.eos_token_ids), self.tokenizer, self._special_ids
        )

    def _collect(self, outputs: list[RequestOutput]) -> None:
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
                self._ended.append(state.abort())
                raise
            if output.finish_reason is not None:
                self._end(request, output.finish_reason)
            outputs.append(output)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if not request.is_finished:
            self.scheduler.finish(request, reason)
        self._forget(request.request_id)

    def _forget(self, name: str) -> None:
        public_id = self._samples.pop(name).public_id
        self._groups[public_id].remove(name)
        if not self._groups[public_id]:
            del self._groups[public_id]

    def _held_bytes(self) -> int:
        leases, memory = self.scheduler.leases, self.runner.store.plan
        return leases.blocks.num_used * memory.block_bytes + leases.rows.num_used * memory.row_bytes

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        c = self._counters
        c.steps[str(result.shape.phase)] += 1
        c.num_prompt_tokens += sum(
            max(0, min(row.end, row.request.num_prompt_tokens) - row.start) for row in plan.rows
        )
        c.num_output_tokens += len(result.token_ids)
        c.num_query_tokens += result.bucket.query_len
        c.num_padded_tokens += result.bucket.query_len - result.shape.query_len
        c.num_preemptions += len(plan.preempted)
        cached = sum(row.end for row in plan.rows)
        if cached >= c.peak_cached_tokens:
            c.peak_cached_tokens = cached
            c.peak_held_bytes = self._held_bytes()
            c.peak_full_attention_bytes = self.runner.store.plan.full_attention_bytes(cached)


def _logprobs_by_request(plan: StepPlan, result: StepResult) -> dict[str, TokenLogprob]:
    if result.logprobs is None:
        return {}
    sampled, rank, top_ids, top = (x.tolist() for x in result.logprobs)
    found = {}
    for index, row in enumerate(plan.sampled_rows):
        width = row.request.params.logprobs
        if width is not None:
            best = dict(zip(top_ids[index][:width], top[index][:width]))
            token = int(result.token_ids[index])
            found[row.request.request_id] = TokenLogprob(token, sampled[index], rank[index], best)
    return found
