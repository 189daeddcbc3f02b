"""Requests that stand alone: who sends them, their lengths, and prefixes that some of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from hpu_duo.lab.traces.arrival import Arrival
from hpu_duo.lab.traces.lengths import Lengths
from hpu_duo.lab.traces.session import Session
from hpu_duo.lab.traces.workloads.workload import check_fields


@dataclass(frozen=True)
class LoneRequests(ABC):
    """Requests without a history; when they come is left to subclasses.

    Attributes:
        prompts, outputs: lengths, those of prompts without the prefix.
        prefix_len: tokens that prompts begin with, on top of their length.
        num_prefixes: different prefixes; each request has one of them at random.
        num_users: each request is of one of them at random.
        seed: other seeds give other requests.
    """

    prompts: Lengths = Lengths(512, 0.8)
    outputs: Lengths = Lengths(128, 0.8)
    prefix_len: int = 0
    num_prefixes: int = 1
    num_users: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, prefix_len=0, num_prefixes=1, num_users=1, seed=0)

    @abstractmethod
    def times(self, num: int, rng: np.random.Generator) -> list[float]:
        """Draw the times of ``num`` requests, in seconds and in order."""

    def sessions(self, num_requests: int) -> list[Session]:
        """Draw ``num_requests`` requests."""
        rng = np.random.default_rng(self.seed)
        times = self.times(num_requests, rng)
        prompts, outputs = (each.draw(num_requests, rng) for each in (self.prompts, self.outputs))
        prefixes = rng.integers(self.num_prefixes, size=num_requests).tolist()
        users = rng.integers(self.num_users, size=num_requests).tolist()
        return [
            Session(
                Arrival(
                    times[at],
                    self.prefix_len + prompts[at],
                    outputs[at],
                    block_ids=(prefixes[at],) if self.prefix_len else (),
                    block_size=max(1, self.prefix_len),
                    user=f"user {users[at]}" if self.num_users > 1 else None,
                )
            )
            for at in range(num_requests)
        ]
