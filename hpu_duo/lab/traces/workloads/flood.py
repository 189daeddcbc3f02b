"""One user who sends more than the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpu_duo.lab.traces.arrival import Arrival
from hpu_duo.lab.traces.lengths import Lengths
from hpu_duo.lab.traces.rate import Rate
from hpu_duo.lab.traces.session import Session
from hpu_duo.lab.traces.workloads.workload import check_fields

FLOODER = "flooder"


@dataclass(frozen=True)
class Flood:
    """Some users at one rate, and one user, the flooder, at a higher one; each with a prefix of its own.

    Attributes:
        num_users: the others.
        per_s: requests per second of each of the others.
        flood_per_s: requests per second of the flooder.
        flood_from_s: time from which it sends.
        burstiness: of everybody's gaps; see ``Rate``.
        prompts, outputs: lengths, those of prompts without the prefix.
        prefix_len, flood_prefix_len: tokens that a user's prompts, and the flooder's, begin with on top of
            that; 0 for none.
        seed: other seeds give other requests.
    """

    num_users: int = 3
    per_s: float = 1.0
    flood_per_s: float = 10.0
    flood_from_s: float = 0.0
    burstiness: float = 1.0
    prompts: Lengths = Lengths(256)
    outputs: Lengths = Lengths(256)
    prefix_len: int = 0
    flood_prefix_len: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, num_users=1, flood_from_s=0, prefix_len=0, flood_prefix_len=0, seed=0)
        for rate in (self.per_s, self.flood_per_s):
            Rate(rate, self.burstiness)  # refuses what is out of range

    def sessions(self, num_requests: int) -> list[Session]:
        """Draw the first ``num_requests`` requests of all users together."""
        names = [FLOODER, *(f"user {number}" for number in range(self.num_users))]
        sent = [
            self._of_user(name, number, num_requests, np.random.default_rng((self.seed, number)))
            for number, name in enumerate(names)
        ]
        coming = sorted((each for one in sent for each in one), key=lambda each: each.time_s)
        return list(map(Session, coming[:num_requests]))

    def _of_user(self, name: str, number: int, num: int, rng: np.random.Generator) -> list[Arrival]:
        """As many requests as there are in all, so that there are enough of everybody."""
        is_flooder = name == FLOODER
        rate = Rate(self.flood_per_s if is_flooder else self.per_s, self.burstiness)
        prefix_len = self.flood_prefix_len if is_flooder else self.prefix_len
        times = rate.times(num, rng) + (self.flood_from_s if is_flooder else 0.0)
        return [
            Arrival(
                time_s,
                prefix_len + prompt,
                output,
                block_ids=(number,) if prefix_len else (),
                block_size=max(1, prefix_len),
                user=name,
            )
            for time_s, prompt, output in zip(
                times.tolist(), self.prompts.draw(num, rng), self.outputs.draw(num, rng)
            )
        ]
