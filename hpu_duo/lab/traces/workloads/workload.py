"""The contract of generators, and those of single requests: by a rate, in bursts, alone, and a flood."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from hpu_duo.lab.traces.arrival import Arrival, Lengths, Rate
from hpu_duo.lab.traces.session import Session


class Workload(Protocol):
    """A generator: a frozen dataclass with a default for each field, among them ``seed``."""

    def sessions(self, num_requests: int) -> list[Session]:
        """Draw sessions with ``num_requests`` requests together, in order of time; one may be cut short."""
        ...


def first_requests(sessions: Sequence[Session], num_requests: int) -> list[Session]:
    """Cut sessions to ``num_requests`` requests, the earliest sessions first.

    Returns:
        As many requests, or all if there are fewer; in order of time.
    """
    kept: list[Session] = []
    left = num_requests
    for session in sorted(sessions, key=lambda each: each.first.time_s):
        if not left:
            break
        kept.append(Session(session.first, session.turns[: left - 1]))
        left -= kept[-1].num_requests
    return kept


def check_fields(workload: Any, **least: float) -> None:
    """Check that fields are finite and not below a least value; ValueError names the first that is."""
    for name, bound in least.items():
        if not bound <= getattr(workload, name) < float("inf"):
            raise ValueError(f"expected {name} of at least {bound:g}, got {getattr(workload, name)}")


def with_shorter(text: str, workload: Any, num_tokens: int) -> str:
    """The text of a generator, with lengths whose medians are ``num_tokens`` together.

    Args:
        text: name and options of the generator; all but its lengths stay.
        workload: the generator of this text.
    """
    found = {each.name: getattr(workload, each.name) for each in fields(workload)}
    lengths = {
        name: value if isinstance(value, Lengths) else Lengths(value)
        for name, value in found.items()
        if isinstance(value, Lengths) or (name.endswith("_len") and value)
    }
    factor = num_tokens / sum(each.median for each in lengths.values())
    name, _, rest = text.partition(":")
    options = [each for each in rest.split(",") if each and each.partition("=")[0] not in lengths]
    for option, each in lengths.items():
        spread = f"~{each.sigma:g}" if each.sigma else ""
        options.append(f"{option}={max(1, round(each.median * factor))}{spread}")
    return f"{name}:{','.join(options)}"


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


@dataclass(frozen=True)
class Poisson(LoneRequests):
    """Requests whose gaps are independent, exponential unless ``burstiness`` says otherwise.

    Attributes:
        per_s: requests per second; infinite lets all come at once.
        burstiness: see ``Rate``.
    """

    per_s: float = 1.0
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        Rate(self.per_s, self.burstiness)  # refuses what is out of range

    def times(self, num: int, rng: np.random.Generator) -> list[float]:
        """Draw the times of ``num`` requests."""
        return Rate(self.per_s, self.burstiness).times(num, rng).tolist()


@dataclass(frozen=True)
class Bursts(LoneRequests):
    """Crowds of requests that come together, as from a script with many threads; crowds come at random.

    Attributes:
        per_s: requests per second on average.
        size: requests of a crowd on average; their number is geometric.
        spread_s: seconds within which a crowd comes, evenly.
    """

    per_s: float = 1.0
    size: float = 20.0
    spread_s: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, size=1, spread_s=0)
        Rate(self.per_s)  # refuses what is out of range

    def times(self, num: int, rng: np.random.Generator) -> list[float]:
        """Draw the times of ``num`` requests."""
        sizes = rng.geometric(1 / self.size, num)
        # More crowds than are needed: each has a request at least.
        begins = Rate(self.per_s / self.size).times(num, rng)
        times = begins.repeat(sizes)[:num]
        return np.sort(times + rng.uniform(0, self.spread_s, num)).tolist()


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
