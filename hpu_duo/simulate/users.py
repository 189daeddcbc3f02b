"""A stated workload for when no traffic was recorded, served by the scheduler on a virtual clock."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from functools import lru_cache

import numpy as np

from graphs import BatchShape, BucketTable, StepLimits
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.trimming import ChunkTrimming
from hpu_duo.request import Request, TokenLimits
from hpu_duo.sampling import SamplingParams
from hpu_duo.simulate.engine import SimulatedEngine
from hpu_duo.simulate.simulation import Simulation

_LOADS = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Users, as shares of the requests that may run at the same time: from nearly idle to overloaded."""
_STEPS_PER_LOAD = 1200
_MEAN_PAUSE = 50
_TYPICAL_PROMPT, _PROMPT_SIGMA = 1024, 1.2
_TYPICAL_OUTPUT, _OUTPUT_SIGMA = 256, 0.8
_LONG_SHARE = 0.2
_SAMPLED_SHARE = 0.03
_MOST_SAMPLES = 8


def prior(limits: StepLimits, seed: int = 0, table: BucketTable | None = None) -> dict[BatchShape, float]:
    """The steps of a stated workload, as the scheduler plans them; no tensors, no model.

    Every step takes one unit of time. Users send a request, wait for its end (of samples, the first one's),
    pause for 50 steps on average (exponential), and send the next. Their number is 0.05, 0.2, 0.5, 1 and 2
    times ``max_num_seqs``, for 1,200 steps each.

    - Four fifths of the prompts are log-normal, of median 1,024 tokens or an eighth of ``max_model_len`` if
      that is less, and sigma 1.2. The others are long: spread evenly on a logarithmic scale from that median
      to ``max_model_len``.
    - Outputs are log-normal, of median 256 tokens or a sixteenth of ``max_model_len``, and sigma 0.8.
    - 3 % of the prompts are answered two to eight times, from one cached prompt.
    - Prompts have nothing in common, so nothing is taken up from a prefix cache.
    - Prompts and outputs that exceed ``max_model_len`` or the blocks are cut.

    Args:
        seed: of the users; another seed gives other users of the same kind.
        table: prompts end at the borders of its buckets, see ``ChunkTrimming``; None trims none.

    Returns:
        The number of steps of each shape; the same for the same arguments.
    """
    return dict(_prior(limits, seed) if table is None else _served(limits, seed, table))


@lru_cache(maxsize=16)
def _prior(limits: StepLimits, seed: int) -> dict[BatchShape, float]:
    return _served(limits, seed, None)


def _served(limits: StepLimits, seed: int, table: BucketTable | None) -> dict[BatchShape, float]:
    trimming = None if table is None else ChunkTrimming(table, limits.block_size).num_postponed
    found: Counter[BatchShape] = Counter()
    for number, load in enumerate(_LOADS):
        rng = random.Random(seed * len(_LOADS) + number)
        users = Users(limits, rng, max(1, round(load * limits.max_num_seqs)))
        simulation = Simulation(SimulatedEngine(Scheduler(limits, trimming), _one_unit), users)
        found.update(step.shape for step in simulation.steps(until=_STEPS_PER_LOAD))
    return {shape: float(count) for shape, count in found.items()}


def _one_unit(bucket: BatchShape) -> float:
    return 1.0


class Users:
    """The users of ``prior``: each has at most one request at a time.

    Args:
        rng: draws lengths and pauses.
        num_users: at least 1.
    """

    def __init__(self, limits: StepLimits, rng: random.Random, num_users: int) -> None:
        held = limits.num_blocks * limits.block_size if limits.uses_blocks else limits.max_model_len
        self._limits = TokenLimits(max(2, min(limits.max_model_len, held)))
        self._rng = rng
        self._num_sent = 0
        # The first requests of all users are spread over the time of one pause.
        self._due: list[float] = sorted(rng.randrange(_MEAN_PAUSE) for _ in range(num_users))
        self._due[0] = 0

    def due(self, now: float) -> list[Request]:
        """Return the requests of users whose pause has ended."""
        found: list[Request] = []
        while self._due and self._due[0] <= now:
            heapq.heappop(self._due)
            found += self._samples()
        return found

    def next_time(self) -> float | None:
        """Return when the next pause ends."""
        return self._due[0] if self._due else None

    def ended(self, request: Request, now: float) -> None:
        """Let the user of the request pause."""
        if request.parent is None:
            heapq.heappush(self._due, now + round(self._rng.expovariate(1 / _MEAN_PAUSE)))

    def _samples(self) -> list[Request]:
        """The next prompt with its lengths drawn, once for each sample."""
        most = self._limits.max_model_len
        typical = max(1.0, min(_TYPICAL_PROMPT, most / 8))
        if self._rng.random() < _LONG_SHARE:
            prompt = typical * (most / typical) ** self._rng.random()
        else:
            prompt = typical * math.exp(self._rng.gauss(0, _PROMPT_SIGMA))
        output = min(_TYPICAL_OUTPUT, most / 16) * math.exp(self._rng.gauss(0, _OUTPUT_SIGMA))
        num_samples = 1
        if self._rng.random() < _SAMPLED_SHARE:
            num_samples = self._rng.randint(2, _MOST_SAMPLES)
        num_prompt = min(max(1, round(prompt)), most - 1)
        params = SamplingParams(max_tokens=min(max(1, round(output)), most - num_prompt), ignore_eos=True)
        name = f"r{self._num_sent}"
        self._num_sent += 1
        first = Request(name, np.full(num_prompt, self._num_sent, np.int32), params, self._limits)
        others = (
            first.sibling(f"{name}.{i}", sample_index=i, sampling_seed=i) for i in range(1, num_samples)
        )
        return [first, *others]
