"""Four invented traffics, for ``table_padding``; none is part of what tables are planned for."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

from graphs import BatchShape, StepLimits
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.planning.simulation import SimulatedEngine, Simulation
from hpu_duo.request import Request, TokenLimits
from hpu_duo.sampling import SamplingParams


@dataclass(frozen=True)
class Size:
    """Log-normal numbers of tokens: median, and sigma of the logarithm."""

    median: float
    sigma: float

    def draw(self, chance: random.Random) -> int:
        """Draw one, at least 1."""
        return max(1, round(self.median * math.exp(chance.gauss(0.0, self.sigma))))


@dataclass(frozen=True)
class Traffic:
    """Users of one kind.

    Attributes:
        name: for tables.
        prompt, output: tokens of a request.
        load: requests that users keep running on average, over ``max_num_seqs``.
        swing: how far the load swings around that, over itself.
        period: steps of one swing.
        sampled: share of prompts that get several answers, and how many.
    """

    name: str
    prompt: Size
    output: Size
    load: float
    swing: float
    period: int
    sampled: tuple[float, int] = (0.0, 1)

    def steps(self, limits: StepLimits, num_steps: int, seed: int) -> dict[BatchShape, int]:
        """Serve such users by the engine's scheduler; returns the steps of each exact shape."""
        users = _Users(self, limits, random.Random(f"{self.name} {seed}"))
        simulation = Simulation(SimulatedEngine(Scheduler(limits), lambda bucket: 1.0), users)
        return dict(Counter(step.shape for step in simulation.steps(until=num_steps)))


TRAFFICS = (
    Traffic("chat, by day and night", Size(350, 1.0), Size(240, 0.7), load=0.5, swing=0.9, period=1500),
    Traffic(
        "questions on long documents", Size(24_000, 0.7), Size(90, 0.5), load=0.25, swing=0.5, period=900
    ),
    Traffic(
        "completions of code, in bursts", Size(1_800, 0.6), Size(28, 0.6), load=0.7, swing=1.0, period=200
    ),
    Traffic(
        "reasoning, four answers to a third of the prompts",
        Size(700, 0.6),
        Size(2_400, 0.5),
        load=0.8,
        swing=0.2,
        period=3000,
        sampled=(1 / 3, 4),
    ),
)


class _Users:
    """As many requests under way as the time asks for; at most one prompt arrives in a step."""

    def __init__(self, traffic: Traffic, limits: StepLimits, chance: random.Random) -> None:
        self._traffic, self._limits, self._chance = traffic, limits, chance
        self._num_made = self._num_unfinished = 0

    def due(self, now: float) -> list[Request]:
        """Return the samples of a prompt while fewer requests are under way than the load asks for."""
        traffic = self._traffic
        wave = 1.0 + traffic.swing * math.sin(2 * math.pi * now / traffic.period)
        if self._num_unfinished >= max(1.0, traffic.load * wave * self._limits.max_num_seqs):
            return []
        found = self._samples()
        self._num_unfinished += len(found)
        return found

    def next_time(self) -> None:
        """Return None: at any time there is a request."""

    def ended(self, request: Request, now: float) -> None:
        """Make room for another one."""
        self._num_unfinished -= 1

    def _samples(self) -> list[Request]:
        most, traffic, chance = self._limits.max_model_len, self._traffic, self._chance
        max_tokens = min(traffic.output.draw(chance), most // 2)
        num_prompt = min(traffic.prompt.draw(chance), most - max_tokens)
        share, num_samples = traffic.sampled
        if chance.random() >= share:
            num_samples = 1
        name = f"r{self._num_made}"
        self._num_made += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        first = Request(name, np.zeros(num_prompt, np.int32), params, TokenLimits(most))
        others = (
            first.sibling(f"{name}.{i}", sample_index=i, sampling_seed=i) for i in range(1, num_samples)
        )
        return [first, *others]
