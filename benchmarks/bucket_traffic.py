"""Shapes of a mixed synthetic workload, planned by the real scheduler; no model is needed for that."""

from __future__ import annotations

import math
import random

import numpy as np

from graphs import BucketTable, StepLimits
from graphs.recording import ShapeRecorder
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.trimming import ChunkTrimming
from hpu_duo.request import Request, TokenLimits
from hpu_duo.sampling import SamplingParams
from hpu_duo.simulate import SimulatedEngine, Simulation

# Share of the requests, median and spread (sigma of the logarithm) of prompt tokens, the same of outputs.
KINDS = (
    (0.55, (400, 0.9), (220, 0.7)),  # chat
    (0.25, (3_000, 0.5), (160, 0.6)),  # retrieved passages
    (0.10, (1_500, 0.6), (1_200, 0.6)),  # code and reasoning
    (0.10, (40_000, 0.9), (300, 0.6)),  # long documents
)
SHARE_WITH_SAMPLES = 0.02
NUM_SAMPLES = 4
PERIOD = 2_000
"""Steps between two rush hours: the load swings from nearly idle to more than can be served."""


class Workload:
    """Users of a deployment, whose number follows the time of day; a step takes one unit of it.

    Args:
        rng: draws kinds and lengths.
    """

    def __init__(self, limits: StepLimits, rng: random.Random) -> None:
        self._limits, self._rng = limits, rng
        self._num_made = self._num_unfinished = 0

    def due(self, now: float) -> list[Request]:
        """Return a request while fewer are served than the time of day asks for."""
        load = 0.5 - 0.5 * math.cos(2 * math.pi * now / PERIOD)
        wanted = max(1, round(1.2 * load * self._limits.max_num_seqs))
        # At most one arrival in a step keeps prompts and decodes mixed, as users do.
        found = self._samples() if self._num_unfinished < wanted else []
        self._num_unfinished += len(found)
        return found

    def next_time(self) -> None:
        """Return None: at any time there is a request."""

    def ended(self, request: Request, now: float) -> None:
        """Make room for another one."""
        self._num_unfinished -= 1

    def _samples(self) -> list[Request]:
        """One request with all of its samples."""
        kinds, weights = [kind[1:] for kind in KINDS], [kind[0] for kind in KINDS]
        prompt, output = self._rng.choices(kinds, weights)[0]
        most = self._limits.max_model_len
        held = self._limits.num_blocks * self._limits.block_size
        max_tokens = min(self._draw(output), most // 4)
        num_prompt = max(2, min(self._draw(prompt), most - max_tokens, held - max_tokens))
        name = f"r{self._num_made}"
        self._num_made += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        first = Request(name, np.zeros(num_prompt, np.int32), params, TokenLimits(most))
        if self._rng.random() >= SHARE_WITH_SAMPLES:
            return [first]
        siblings = [
            first.sibling(f"{name}.{i}", sample_index=i, sampling_seed=i) for i in range(1, NUM_SAMPLES)
        ]
        return [first, *siblings]

    def _draw(self, size: tuple[float, float]) -> int:
        return max(1, round(math.exp(self._rng.gauss(math.log(size[0]), size[1]))))


def record(
    limits: StepLimits,
    num_steps: int,
    seed: int,
    recorder: ShapeRecorder,
    table: BucketTable | None = None,
) -> int:
    """Run ``num_steps`` steps and record the exact shape of each; returns the tokens that were computed.

    Args:
        table: trim prompts to its buckets.
    """
    trimming = None if table is None else ChunkTrimming(table, limits.block_size).num_postponed
    users = Workload(limits, random.Random(seed))
    num_tokens = 0
    engine = SimulatedEngine(Scheduler(limits, trimming), lambda bucket: 1.0)
    for step in Simulation(engine, users).steps(until=num_steps):
        recorder.add(step.shape)
        num_tokens += step.plan.num_tokens
    return num_tokens
