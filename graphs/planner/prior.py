"""A stated workload for when no traffic was recorded, served by a small model of the scheduler."""

from __future__ import annotations

import heapq
import math
import random
from functools import lru_cache

from graphs.limits import BucketLimits
from graphs.planner.server import Sequence, Server
from graphs.shape import BatchShape

_LOADS = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Users, as shares of the requests that may run at the same time: from nearly idle to overloaded."""
_STEPS_PER_LOAD = 1200
_MEAN_PAUSE = 50
_TYPICAL_PROMPT, _PROMPT_SIGMA = 1024, 1.2
_TYPICAL_OUTPUT, _OUTPUT_SIGMA = 256, 0.8
_LONG_SHARE = 0.2
_SAMPLED_SHARE = 0.03
_MOST_SAMPLES = 8


def prior(limits: BucketLimits, seed: int = 0) -> dict[BatchShape, float]:
    """The steps of a stated workload, as a model of the scheduler plans them; no tensors, no model.

    Users send a request, wait for its end, pause for 50 steps on average (exponential), and send the next.
    Their number is 0.05, 0.2, 0.5, 1 and 2 times ``max_num_seqs``, for 1,200 steps each.

    - Four fifths of the prompts are log-normal, of median 1,024 tokens or an eighth of ``max_model_len`` if
      that is less, and sigma 1.2. The others are long: spread evenly on a logarithmic scale from that median
      to ``max_model_len``.
    - Outputs are log-normal, of median 256 tokens or a sixteenth of ``max_model_len``, and sigma 0.8.
    - 3 % of the prompts are answered two to eight times, from one cached prompt.
    - What exceeds ``max_model_len`` or the blocks held is cut.

    The model (``Server``) follows the rules of the scheduler: decodes, prompts under way, new ones, in order
    of arrival; blocks with the lowest free numbers; the latest arrival gives way when they run out.

    Returns:
        How many steps had each shape; the same for the same limits and seed.
    """
    return dict(_prior(limits, seed))


@lru_cache(maxsize=16)
def _prior(limits: BucketLimits, seed: int) -> dict[BatchShape, float]:
    found: dict[BatchShape, float] = {}
    for number, load in enumerate(_LOADS):
        server = Server(limits)
        users = _Users(
            limits, random.Random(seed * len(_LOADS) + number), max(1, round(load * server.num_rows))
        )
        for step in range(_STEPS_PER_LOAD):
            for sequence in users.arrivals(step):
                server.add(sequence)
            shape, num_ended = server.step()
            users.pause(step, num_ended)
            if shape is not None:
                found[shape] = found.get(shape, 0.0) + 1.0
    return found


class _Users:
    """Who sends what, and when."""

    def __init__(self, limits: BucketLimits, rng: random.Random, num_users: int) -> None:
        held = limits.num_blocks * limits.block_size if limits.uses_blocks else limits.max_model_len
        self._most = max(2, min(limits.max_model_len, held))
        self._rng = rng
        # The first requests of all users are spread over the time of one pause.
        self._due = sorted(rng.randrange(_MEAN_PAUSE) for _ in range(num_users))
        self._due[0] = 0

    def arrivals(self, step: int) -> list[Sequence]:
        found = []
        while self._due and self._due[0] <= step:
            heapq.heappop(self._due)
            found.append(self._sequence())
        return found

    def pause(self, step: int, num_users: int) -> None:
        for _ in range(num_users):
            heapq.heappush(self._due, step + 1 + round(self._rng.expovariate(1 / _MEAN_PAUSE)))

    def _sequence(self) -> Sequence:
        typical = max(1.0, min(_TYPICAL_PROMPT, self._most / 8))
        if self._rng.random() < _LONG_SHARE:
            prompt = typical * (self._most / typical) ** self._rng.random()
        else:
            prompt = typical * math.exp(self._rng.gauss(0, _PROMPT_SIGMA))
        output = min(_TYPICAL_OUTPUT, self._most / 16) * math.exp(self._rng.gauss(0, _OUTPUT_SIGMA))
        num_samples = 1
        if self._rng.random() < _SAMPLED_SHARE:
            num_samples = self._rng.randint(2, _MOST_SAMPLES)
        num_prompt = min(max(1, round(prompt)), self._most - 1)
        return Sequence(num_prompt, min(num_prompt + max(1, round(output)), self._most), num_samples)
