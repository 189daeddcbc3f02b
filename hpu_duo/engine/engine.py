"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphs.bucket_file import write_shapes
from graphs.interrupts import Deferral, interrupts_deferred
from hpu_duo.device.ranks import RankError
from hpu_duo.engine.contexts import Contexts, PrefixCopies
from hpu_duo.engine.intake import Add, Calls, Entry, Intake, Prompt, warn_of_cuts
from hpu_duo.engine.outputs import (
    Completion,
    ContinuationScore,
    FairLock,
    RequestOutput,
)
from hpu_duo.engine.replanning import FIRST_PLAN, Replanner
from hpu_duo.engine.samples import forced, score_of
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.stats import EngineStats
from hpu_duo.engine.stepper import Runner, Stepper
from hpu_duo.not_picklable import NotPicklable
from hpu_duo.request import TokenLimits
from hpu_duo.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from graphs.bucket_file import ShapeRecorder
    from hpu_duo.drafting import Drafter
    from hpu_duo.engine.telemetry import StepListener, StepSink
    from hpu_duo.heads import HeadPattern
    from hpu_duo.request import PrefixHold
    from hpu_duo.scheduling.ranker import Ranker

_log = logging.getLogger(__name__)


class Engine(NotPicklable):
    """Serves requests: ``add_request``, then ``step`` until ``has_unfinished`` is False.

    ``add_request`` rejects a request that cannot be served before anything changes; others are not affected.

    Any thread may call any method at any time. One step runs at a time and serves the requests of all
    threads, so concurrent calls of ``generate`` are batched together; a fair lock orders the threads, and
    each receives the outputs of its own requests. Callbacks run between steps and may call every method too.
    Requests without a seed are assigned one in order of arrival, which varies between threads.

    Args:
        runner: the device side.
        scheduler: plans the steps.
        limits: the model's limits of tokens.
        tokenizer: for text and stop strings; without it outputs carry token ids only.
        seed: base of the seeds of requests without one.
        ranker: scores prompts for the scheduling policy, if it needs that.

    Attributes:
        contexts: prefixes that stay cached until they are closed.
        notes: remarks for the user on how the model was loaded; ``stats`` has them too.
        hf_config: transformers' configuration of the whole model, also where ranks share it.
        pattern, own_pattern: the binarised head pattern, and that of this rank's heads; None if all heads
            retrieve.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        limits: TokenLimits,
        tokenizer: PreTrainedTokenizerBase | None = None,
        seed: int = 0,
        ranker: Ranker | None = None,
    ) -> None:
        self.runner, self.scheduler, self.limits, self.tokenizer = runner, scheduler, limits, tokenizer
        self._intake = Intake(limits, tokenizer, seed, ranker)
        self._stepper = Stepper(runner, scheduler)
        self._samples, self._output_queue = self._stepper.samples, self._stepper.output_queue
        self._turns = FairLock()
        self._calls = Calls(self._stepper, self._turns, runner.store.plan.max_num_seqs)
        self._entry = Entry(self._intake, scheduler, self._stepper, self._turns)
        copies = PrefixCopies(runner, scheduler, self._stepper, self._turns)
        self.contexts = Contexts(self._intake, self._entry, self._calls, scheduler, self._turns, copies)
        self.notes: tuple[str, ...] = ()
        self.hf_config: Any = None
        self.pattern: HeadPattern | None = None
        self.own_pattern: HeadPattern | None = None

    @property
    def recorder(self) -> ShapeRecorder | None:
        """Recorder of the shape of every step, if any."""
        return self._stepper.telemetry.recorder

    @recorder.setter
    def recorder(self, recorder: ShapeRecorder | None) -> None:
        """Record shapes there from now on."""
        telemetry = self._stepper.telemetry
        telemetry.recorder = recorder
        telemetry.shapes.recording = None if recorder is None else recorder.path

    @property
    def step_recorder(self) -> StepSink | None:
        """Recorder of every step, if any."""
        return self._stepper.telemetry.step_recorder

    @step_recorder.setter
    def step_recorder(self, recorder: StepSink | None) -> None:
        """Record steps there from now on.

        Raises:
            ValueError: prefixes are loaded from host memory, whose content is not in a recording.
        """
        if recorder is not None and self.scheduler.allocations.tiers is not None:
            raise ValueError(
                "steps are recorded without kv_offloading_size: what they load from host memory is in no "
                "recording"
            )
        self._stepper.telemetry.step_recorder = recorder

    @property
    def profiler(self) -> StepListener | None:
        """Profiler of some steps, if any."""
        return self._stepper.telemetry.profiler

    @profiler.setter
    def profiler(self, profiler: StepListener | None) -> None:
        """Notify it of every step from now on."""
        self._stepper.telemetry.profiler = profiler

    def replan(self, budget_s: float, first_plan: int = FIRST_PLAN) -> None:
        """Plan the bucket table again for the steps that are served, in the background, from now on.

        Args:
            budget_s: seconds that the capture of other buckets may take, all together.
            first_plan: number of steps before the first plan.

        Raises:
            ValueError: steps are not padded to a table.
        """
        if not self.runner.executor.uses_table:
            raise ValueError(
                "replan needs a table of buckets to exchange: expected graphs other than 'eager', or "
                "buckets, got neither"
            )
        shapes = self._stepper.telemetry.shapes
        self._stepper.replanner = Replanner(
            self.runner, self.scheduler.limits, shapes.reservoir, budget_s, first_plan, shapes.restart
        )

    def replan_idle(self) -> bool:
        """Exchange a bucket of a table that was planned again, while no request waits.

        Returns:
            Whether there are more.
        """
        with interrupts_deferred() as deferral, self._turns:
            replanner = self._stepper.replanner
            if replanner is None or self.has_unfinished:
                return False
            with deferral.lifted():
                replanner.advance(is_idle=True)
            return replanner.can_go_on

    def settle_idle(self) -> bool:
        """Begin or wait for a transfer to host memory, or a write to disk, while no request waits.

        Returns:
            Whether there may be more.
        """
        with interrupts_deferred() as deferral, self._turns:
            tiers = self.scheduler.allocations.tiers
            if tiers is None or self.has_unfinished:
                return False
            if tiers.has_stores:
                return self._store_idle(deferral)
            with deferral.lifted():
                return tiers.settle()

    def _store_idle(self, deferral: Deferral) -> bool:
        """Run a step that only copies to host memory; False if it fails, which loses the cache."""
        try:
            self._stepper.advance(deferral)
        except RankError:
            raise
        except Exception as error:
            self.scheduler.discard()
            _log.warning("a step between requests failed, so cached prefixes are lost: %r", error)
            return False
        return True

    @property
    def has_disk(self) -> bool:
        """Whether what is copied to host memory is written to a disk, which a later engine reads."""
        tiers = self.scheduler.allocations.tiers
        return tiers is not None and tiers.disk is not None

    @property
    def is_planning(self) -> bool:
        """Whether another process plans the bucket table; ``replan_idle`` takes its result."""
        replanner = self._stepper.replanner
        return replanner is not None and replanner.is_planning

    @property
    def drafter(self) -> Drafter | None:
        """Proposes tokens that decodes verify, up to ``decode_len - 1`` in a step; None = no drafts."""
        return self._stepper.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        """Draft with it from the next step on; outputs stay what they are.

        Raises:
            ValueError: ``decode_len`` is 1.
        """
        with interrupts_deferred(), self._turns:
            self._stepper.drafter = drafter

    @property
    def has_unfinished(self) -> bool:
        """Whether another ``step`` would run or report something, for requests of all threads."""
        return (
            self.scheduler.has_unfinished
            or self._output_queue.has_unreported
            or self._stepper.has_uncollected
        )

    def add_request(
        self,
        prompt_token_ids: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        name: str | None = None,
        score: float | None = None,
        context: PrefixHold | None = None,
    ) -> str:
        """Queue a prompt; returns its id.

        Args:
            request_id: name of the request in outputs; default a new one.
            name: of the request in error messages; default ``request`` and its id.
            score: result of ``rank`` for the prompt; None computes it here.
            context: a context that the prompt begins with, pinned until the request ends; ``cache_salt`` has
                to be the same.

        Raises:
            ValueError: the prompt is empty, too long for the model or the cache, or has tokens outside
                the vocabulary; the id is in use; parameters do not fit the model.
        """
        return self._entry.add(prompt_token_ids, _samples_of(params), request_id, name, score, context)

    def check_request(
        self, prompt_token_ids: Prompt, params: SamplingParams | None = None, *, name: str | None = None
    ) -> None:
        """Validate a prompt and parameters like ``add_request``, but for the id, without waiting for a step.

        Args:
            name: of the request in error messages.

        Raises:
            ValueError: see ``add_request``; a ``FieldError`` where one field of the parameters is at fault.
        """
        for request in self._intake.requests("", 0, prompt_token_ids, _samples_of(params), name):
            self.scheduler.check_fits(request)

    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar of ``structured_outputs`` ahead; steps of other threads go on meanwhile.

        ``add_request`` does so too.

        Raises:
            ValueError: it cannot be compiled, at all or for this model; the message names the field.
        """
        self._intake.prepare(params)

    @property
    def has_ranker(self) -> bool:
        """Whether prompts are scored for the scheduling policy."""
        return self._intake.ranker is not None

    def rank(self, prompts: Sequence[Prompt]) -> list[float]:
        """Return the ranker's scores of valid prompts, 0 without a ranker; thread-safe."""
        ranker = self._intake.ranker
        return [0.0] * len(prompts) if ranker is None else ranker.score(prompts)

    def abort(self, request_id: str) -> bool:
        """End all samples of a request early; False if no unfinished request has this id.

        The next ``step`` reports an output with finish reason ``abort`` for each, or the ``generate`` that
        they belong to.
        """
        with interrupts_deferred(), self._turns:
            return self._stepper.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the new outputs of each request.

        Requests of a ``generate`` that is under way are served too, and reported there.

        An error of one request, while its row is built, sampled or detokenized, ends that request with finish
        reason ``error``. If the step as a whole fails, its error is raised, pending outputs are returned by
        the next step, and the requests are recomputed. After two failures, or one for lack of a bucket, the
        requests of the failed steps run one by one, and a request that fails alone ends with that error.
        """
        outputs: list[RequestOutput] = []
        try:
            with interrupts_deferred() as deferral, self._turns:
                self._stepper.advance(deferral)
                outputs = self._output_queue.swap(outputs)
            return outputs
        except BaseException:
            with interrupts_deferred(), self._turns:
                self._output_queue.put_back(outputs)
            raise

    def when_ranks_are_lost(self, callback: Callable[[RankError], None]) -> None:
        """Register a callback, called in any thread, for the loss of another rank of the model.

        A rank may be lost between steps, or in a step, which then may not end. Nothing can be computed after.
        """
        followers = self.runner.executor.followers
        if followers is not None:
            followers.when_lost(callback)

    def kill_ranks(self) -> bool:
        """End the other ranks of the model at once, if there are any; says whether there are.

        A step under way fails, since it waits for them; nothing can be computed from then on.
        """
        followers = self.runner.executor.followers
        if followers is not None:
            followers.kill()
        return followers is not None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Context manager that blocks the steps of other threads."""
        with interrupts_deferred() as deferral, self._turns, deferral.lifted():
            yield

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
        context: PrefixHold | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        raises: bool = True,
    ) -> list[list[Completion]]:
        """Generate from prompts until all end; returns the ``n`` samples of each, in order of the prompts.

        If a prompt is invalid, an error ends one of the requests (it is raised here), or the loop is
        interrupted, the other requests of this call are aborted. Outputs truncated by ``max_model_len`` are
        warned of once.

        Args:
            params: one for all prompts, or one each.
            on_output: called with each output of this call, between steps; it may call any method. Outputs of
                other requests are returned by the next ``step``.
            context: of all prompts, see ``add_request``.
            request_ids: names of the requests in outputs; default new ones.
            raises: False = serve the other requests when an error ends one, which its last output has.
        """
        prompts = list(prompts)
        each = (
            [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        )
        if len(each) != len(prompts):
            raise ValueError(f"expected one SamplingParams per prompt, got {len(each)} for {len(prompts)}")
        names = [None] * len(prompts) if request_ids is None else list(request_ids)
        waiting: deque[Add] = deque(
            partial(self._entry.add, prompt, _samples_of(one), own, name=f"prompt {number}", context=context)
            for number, (prompt, one, own) in enumerate(zip(prompts, each, names, strict=True))
        )
        done = self._calls.serve(waiting, on_output, raises=raises)
        warn_of_cuts(done, each, self.limits.max_model_len)
        return done

    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Sequence[Prompt]],
    ) -> list[list[ContinuationScore]]:
        """Compute the log-probabilities of given continuations by decoding them.

        Each prompt is prefilled but for its last token. That token and the continuation are then decoded,
        ``decode_len`` tokens per step, with forced outputs. So every probability comes from a decode that
        reads the cache as generation does, without the tokens that a head pattern does not store.
        Continuations of one prompt share its prefill if there are at least as many rows as continuations.

        Args:
            prompts: token ids, at least one each.
            continuations: for each prompt the continuations to score, each of at least one token.

        Returns:
            For each prompt the scores of its continuations, in order.

        Raises:
            ValueError: the numbers differ, a prompt or continuation is empty, has tokens outside the
                vocabulary, or is too long for the model. Other requests of this call are aborted.
        """
        if len(prompts) != len(continuations):
            raise ValueError(
                f"expected continuations for each of {len(prompts)} prompts, got {len(continuations)}"
            )
        asked = [[forced(tokens) for tokens in each] for each in continuations]
        for number, each in enumerate(asked):
            if not each:
                raise ValueError(f"prompt {number}: expected at least one continuation, got none")
            # Validates before any continuation runs.
            self._intake.requests("", 0, prompts[number], each, f"prompt {number}")
        waiting: deque[Add] = deque(
            partial(self._entry.add, prompt, each) for prompt, each in zip(prompts, asked)
        )
        done = self._calls.serve(waiting, None, [len(each) for each in asked])
        return [[score_of(sample) for sample in samples] for samples in done]

    def stats(self) -> EngineStats:
        """Return a snapshot of counts and memory."""
        with interrupts_deferred(), self._turns:
            return EngineStats.of(self._stepper, self.scheduler, self.runner, self._patterns, self.notes)

    @property
    def _patterns(self) -> tuple[HeadPattern, HeadPattern] | None:
        return None if self.pattern is None else (self.pattern, self.own_pattern or self.pattern)

    def write_shapes(self, path: str | Path) -> None:
        """Write a sample of the shapes of all steps so far, to plan a bucket table from.

        Raises:
            ValueError: no step has run, or the file cannot be written.
        """
        with interrupts_deferred(), self._turns:
            counts = self._stepper.telemetry.shapes.reservoir.counts()
        if not counts:
            raise ValueError("expected shapes of steps to write, got no step")
        try:
            write_shapes(path, counts)
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}") from error


def _samples_of(params: SamplingParams | None) -> list[SamplingParams]:
    """Return the parameters of each sample of a prompt."""
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params: expected SamplingParams or None, got {type(params).__name__}")
    return [params] * params.n
