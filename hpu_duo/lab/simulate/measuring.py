"""Times of an engine's steps, measured by serving requests of many lengths and numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphs import BatchShape
from hpu_duo.lab.simulate.step_times import StepTimes
from hpu_duo.sampling import SamplingParams

if TYPE_CHECKING:
    from hpu_duo.engine.engine import Engine
    from hpu_duo.engine.step_input import StepInput

_NUM_OUTPUTS = 12


@dataclass(frozen=True)
class Batch:
    """Requests that are served together: some at once, and as many again while those decode."""

    num_requests: int
    num_prompt_tokens: int


class StepTimer:
    """Sends requests to an engine and times its steps, whose shapes it gets as a step recorder.

    Attributes:
        steps: pairs of shape and seconds; the shape is the bucket's if the engine pads.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine, self._clock = engine, clock
        self._has_table = len(engine.runner.graphs.table) > 0
        self._shape: BatchShape | None = None
        self._sent: list[str] = []
        self.steps: list[tuple[BatchShape, float]] = []

    def add(self, message: StepInput, token_ids: object) -> None:
        """Note the shape of the step that is under way."""
        self._shape = message.bucket if self._has_table else message.shape

    def send(self, num_requests: int, num_prompt_tokens: int, rng: np.random.Generator) -> None:
        """Queue requests of random tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=_NUM_OUTPUTS, ignore_eos=True)
        vocab_size = self._engine.limits.vocab_size or 2
        for _ in range(num_requests):
            tokens = rng.integers(0, vocab_size, num_prompt_tokens).tolist()
            self._sent.append(self._engine.add_request(tokens, params))

    def run(self, end: float, num_steps: float = math.inf) -> None:
        """Make steps while there are requests, at most ``num_steps``, and none after ``end``."""
        done = 0
        while self._engine.has_unfinished and done < num_steps and self._clock() < end:
            self._shape, began = None, self._clock()
            self._engine.step()
            seconds = self._clock() - began
            if self._shape is not None:
                self.steps.append((self._shape, seconds))
            done += 1

    def abort(self) -> None:
        """End the requests that are left."""
        for request_id in self._sent:
            self._engine.abort(request_id)
        while self._engine.has_unfinished:  # their ends are still to be told
            self._engine.step()


def batches(max_num_seqs: int, max_len: int, num_held_tokens: int | None) -> list[Batch]:
    """Return batches of one request to ``max_num_seqs`` and of short to long prompts, doubled each time.

    Args:
        max_len: tokens of the longest prompt.
        num_held_tokens: tokens that blocks hold; None for no bound.
    """
    found = []
    for num in _doubled(1, max_num_seqs):
        for length in _doubled(min(16, max_len), max_len):
            if num_held_tokens is None or num * (length + _NUM_OUTPUTS) <= num_held_tokens:
                found.append(Batch(num, length))
    return found


def measure_steps(
    engine: Engine,
    *,
    max_seconds: float = 120.0,
    seed: int = 0,
    description: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:
    """Serve batches of random prompts, in random order and again and again, and time every step.

    The first round of all batches is left out if there is time for another one, since what is compiled or
    allocated at first use is in it.

    Args:
        engine: warmed up, and serving nothing else.
        max_seconds: no step begins later, but for those of the first batch.
        seed: of prompts and order.
        description: of the engine, for the table.
        clock: in seconds.

    Raises:
        ValueError: the engine serves requests.
    """
    if engine.has_unfinished:
        raise ValueError("expected an engine without requests to measure")
    limits, rng = engine.scheduler.limits, np.random.default_rng(seed)
    held = limits.num_blocks * limits.block_size if limits.uses_blocks else None
    longest = limits.max_model_len - _NUM_OUTPUTS
    if held is not None:
        longest = min(longest, held - _NUM_OUTPUTS)
    every = batches(limits.max_num_seqs, max(1, longest), held) or [Batch(1, 1)]
    timer, end = StepTimer(engine, clock), clock() + max_seconds
    engine.step_recorder, previous = timer, engine.step_recorder
    num_first = 0
    try:
        for number, batch in enumerate(_in_rounds(every, rng)):
            _serve(timer, batch, rng, end if number else math.inf)
            if clock() >= end:
                break
            if number == len(every) - 1:
                num_first = len(timer.steps)
    finally:
        engine.step_recorder = previous
        timer.abort()
    steps = timer.steps[num_first:] or timer.steps
    return StepTimes.of(steps, limits, tuple(engine.runner.graphs.table), description)


def _in_rounds(every: list[Batch], rng: np.random.Generator) -> Iterator[Batch]:
    while True:
        for place in rng.permutation(len(every)):
            yield every[place]


def _serve(timer: StepTimer, batch: Batch, rng: np.random.Generator, end: float) -> None:
    """Serve a batch; no step begins after ``end``."""
    first = -(-batch.num_requests // 2)
    timer.send(first, batch.num_prompt_tokens, rng)
    timer.run(end, num_steps=3)  # those that come now find decodes under way
    timer.send(batch.num_requests - first, batch.num_prompt_tokens, rng)
    timer.run(end)


def _doubled(first: int, last: int) -> Iterator[int]:
    while first < last:
        yield first
        first *= 2
    yield last
