"""Conversations of people with a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpu_duo.lab.traces.arrival import Arrival
from hpu_duo.lab.traces.lengths import Lengths
from hpu_duo.lab.traces.rate import Rate
from hpu_duo.lab.traces.session import Session, Turn
from hpu_duo.lab.traces.workloads.workload import check_fields, first_requests

_SYSTEM_PROMPT = 0


@dataclass(frozen=True)
class Chats:
    """Chats under one system prompt: each turn has the whole chat in its prompt.

    Attributes:
        per_s: chats that begin, per second.
        turns: requests of a chat on average; their number is geometric.
        pause_s: seconds on average in which a person reads and writes; exponential.
        messages, outputs: lengths of what people write, and of the answers.
        system_len: tokens of the system prompt; 0 for none.
        num_users: each chat is of one of them at random.
        seed: other seeds give other chats.
    """

    per_s: float = 0.2
    turns: float = 5.0
    pause_s: float = 20.0
    messages: Lengths = Lengths(64, 1.0)
    outputs: Lengths = Lengths(192, 0.8)
    system_len: int = 512
    num_users: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, turns=1, pause_s=0, system_len=0, num_users=1, seed=0)
        Rate(self.per_s)  # refuses what is out of range

    def sessions(self, num_requests: int) -> list[Session]:
        """Draw chats with ``num_requests`` requests together."""
        rng = np.random.default_rng(self.seed)
        # A chat has a request at least, so there are enough of them.
        times = Rate(self.per_s).times(num_requests, rng).tolist()
        return first_requests([self._chat(time, rng) for time in times], num_requests)

    def _chat(self, time_s: float, rng: np.random.Generator) -> Session:
        num = int(rng.geometric(1 / self.turns))
        messages, outputs = self.messages.draw(num, rng), self.outputs.draw(num, rng)
        pauses = rng.exponential(self.pause_s, num).tolist()
        first = Arrival(
            time_s,
            self.system_len + messages[0],
            outputs[0],
            block_ids=(_SYSTEM_PROMPT,) if self.system_len else (),
            block_size=max(1, self.system_len),
            user=f"user {int(rng.integers(self.num_users))}" if self.num_users > 1 else None,
        )
        return Session(first, tuple(map(Turn, pauses[1:], messages[1:], outputs[1:])))
