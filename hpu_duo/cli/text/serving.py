"""Run prompts on an engine step by step, and measure prefill and decode apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hpu_duo.cli.terminal.waiting import Waiting

if TYPE_CHECKING:
    from hpu_duo.engine.engine import Engine
    from hpu_duo.engine.outputs import Completion, RequestOutput
    from hpu_duo.engine.stats import EngineStats
    from hpu_duo.prefix_hold import PrefixHold
    from hpu_duo.sampling import SamplingParams


class View(Protocol):
    """A watcher of a run; text that is streamed is written as it comes."""

    is_streamed: bool

    def prefilled(self, done: int, total: int) -> None:
        """Prompt tokens computed so far, and all of them."""

    def received(self, index: int, output: RequestOutput) -> None:
        """Something was added to prompt number ``index``."""

    def ended(self) -> None:
        """Nothing more will come, whatever the reason."""


@dataclass
class Pace:
    """Tokens and seconds of one kind of step."""

    num_tokens: int = 0
    seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Account for a step."""
        self.num_tokens += num_tokens
        self.seconds += seconds

    @property
    def tokens_per_s(self) -> float | None:
        """None when no such step has run."""
        return self.num_tokens / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True)
class RunReport:
    """Results of a run.

    Attributes:
        completions: one per prompt, in order; unfinished ones without a finish reason if interrupted.
        prefill: prompt tokens, and the seconds of steps that computed any.
        decode: tokens sampled in the other steps, and their seconds.
        stats: the engine's counters at the end.
        is_interrupted: the user stopped the run.
    """

    completions: tuple[Completion, ...]
    prefill: Pace
    decode: Pace
    stats: EngineStats
    is_interrupted: bool


class Run:
    """Prompts that an engine has accepted, all or none of them.

    Args:
        context: what all of them begin with, kept by the engine.

    Raises:
        ValueError: the engine refuses a prompt, which the message calls by its place, counted from 1, or its
            parameters.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        context: PrefixHold | None = None,
    ) -> None:
        from hpu_duo.engine.outputs import Completion

        self._engine, self._params = engine, params
        self._num_prompt_tokens = sum(map(len, prompts))
        self._index: dict[str, int] = {}
        try:
            for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                name = engine.add_request(prompt, one, name=f"prompt {index + 1}", context=context)
                self._index[name] = index
        except ValueError:
            self._abort()
            raise
        self._completions = tuple(Completion(name, 0) for name in self._index)

    def finish(self, view: View) -> RunReport:
        """Step until every prompt is answered or the user interrupts."""
        from hpu_duo.engine.model_len import warn_of_cuts

        prefill, decode = Pace(), Pace()
        is_interrupted = False
        try:
            # A step that captures a graph may take half a minute.
            with Waiting("running a step, which may capture a graph") as wait:
                while self._engine.has_unfinished:
                    self._step(view, prefill, decode, wait)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            view.ended()
            stats = self._engine.stats()
            self._abort()
        warn_of_cuts([[one] for one in self._completions], self._params, self._engine.limits.max_model_len)
        return RunReport(self._completions, prefill, decode, stats, is_interrupted)

    def _step(self, view: View, prefill: Pace, decode: Pace, wait: Waiting) -> None:
        before = self._engine.stats().num_prompt_tokens
        began = time.perf_counter()
        outputs = self._engine.step()
        wait.progressed()
        seconds = time.perf_counter() - began
        num_prefilled = self._engine.stats().num_prompt_tokens - before
        if num_prefilled:
            prefill.add(num_prefilled, seconds)
        else:
            decode.add(sum(len(output.token_ids) for output in outputs), seconds)
        # A preempted prompt is computed again, which is no progress.
        view.prefilled(min(prefill.num_tokens, self._num_prompt_tokens), self._num_prompt_tokens)
        for output in outputs:
            index = self._index[output.request_id]
            if output.error is not None:
                raise output.error
            self._completions[index].add(output)
            if view.is_streamed and output.text:
                wait.end()  # it would write over the text, on the same line of a terminal
            view.received(index, output)

    def _abort(self) -> None:
        for request_id in self._index:
            self._engine.abort(request_id)
