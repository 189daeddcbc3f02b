"""One request of a trace: its time, its length, and the blocks its prompt shares with others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Arrival:
    """Time and numbers of tokens of a request.

    Attributes:
        time_s: seconds since the beginning of the trace.
        num_prompt_tokens, num_output_tokens: at least 1.
        block_ids: names of the prompt's blocks from its beginning on. Prompts whose first ``n`` ids are equal
            share their first ``n`` blocks; equal ids behind different ones mean nothing. May be shorter than
            the prompt, whose rest is then not shared.
        block_size: tokens of a named block; the last one may be cut by the end of the prompt.
        session: the conversation it belongs to, if the trace tells.
        user: who sent it, if the trace tells.
        text: the prompt itself, if the trace has it.

    Raises:
        ValueError: a time or a length out of range.
    """

    time_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_size: int = 512
    session: str | None = None
    user: str | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.time_s < math.inf:
            raise ValueError(f"expected a time of at least 0 s, got {self.time_s}")
        for name in ("num_prompt_tokens", "num_output_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output together."""
        return self.num_prompt_tokens + self.num_output_tokens


def in_order(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """Sort by time, counted from the first one on; those of the same time keep their order."""
    ordered = sorted(arrivals, key=_time)
    if not ordered or ordered[0].time_s == 0:
        return ordered
    first = ordered[0].time_s
    return [replace(each, time_s=each.time_s - first) for each in ordered]


def scaled(arrivals: Iterable[Arrival], *, speed: float = 1.0, lengths: float = 1.0) -> list[Arrival]:
    """Let time pass ``speed`` times as fast, and multiply numbers of tokens by ``lengths``.

    Named blocks are scaled with the prompts, so what was shared stays shared. Every length stays at least 1.

    Raises:
        ValueError: a factor that is not above 0 and finite.
    """
    for name, factor in (("speed", speed), ("lengths", lengths)):
        if not 0 < factor < math.inf:
            raise ValueError(f"expected {name} above 0, got {factor}")
    return [
        replace(
            each,
            time_s=each.time_s / speed,
            num_prompt_tokens=max(1, round(each.num_prompt_tokens * lengths)),
            num_output_tokens=max(1, round(each.num_output_tokens * lengths)),
            block_size=max(1, round(each.block_size * lengths)),
        )
        for each in arrivals
    ]


def no_longer_than(arrivals: Iterable[Arrival], max_tokens: int) -> list[Arrival]:
    """Leave out requests whose prompt and output together have more than ``max_tokens``."""
    return [each for each in arrivals if each.num_tokens <= max_tokens]


def at_times(arrivals: Iterable[Arrival], times_s: Sequence[float]) -> list[Arrival]:
    """Let the same requests come at other times, in seconds, one for each."""
    return [replace(each, time_s=float(time)) for each, time in zip(arrivals, times_s, strict=True)]


def _time(arrival: Arrival) -> float:
    return arrival.time_s


@dataclass(frozen=True)
class Rate:
    """Independent gaps between requests, of one mean.

    Attributes:
        per_s: requests per second; infinite lets all come at once.
        burstiness: the shape of the gaps' gamma distribution. 1 is a Poisson process; below 1 requests come
            in bursts (the gaps' coefficient of variation is ``burstiness ** -0.5``), above 1 they come more
            evenly, and infinite is one each ``1 / per_s`` seconds. Its name and meaning are those of vLLM's
            benchmark.

    Raises:
        ValueError: one of them is not above 0.
    """

    per_s: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("per_s", "burstiness"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} above 0, got {getattr(self, name)}")

    def gaps(self, num: int, rng: np.random.Generator) -> np.ndarray:
        """Draw the seconds before each of ``num`` requests; float64 [num]."""
        if math.isinf(self.per_s):
            return np.zeros(num)
        if math.isinf(self.burstiness):
            return np.full(num, 1 / self.per_s)
        return rng.gamma(self.burstiness, 1 / (self.per_s * self.burstiness), num)

    def times(self, num: int, rng: np.random.Generator, *, fixes_mean: bool = False) -> np.ndarray:
        """Draw the times of ``num`` requests, in seconds and in order; float64 [num].

        Args:
            fixes_mean: stretch the times so that the last request comes at ``num / per_s`` exactly. Runs of a
                few hundred requests with different seeds then offer the same load.
        """
        times = np.cumsum(self.gaps(num, rng))
        if fixes_mean and num and times[-1] > 0:
            times *= num / self.per_s / times[-1]
        return times


@dataclass(frozen=True)
class Lengths:
    """Log-normal numbers of tokens, at least 1.

    Attributes:
        median: tokens.
        sigma: standard deviation of the logarithm; 0 gives every request the median. Outputs of chats have
            about 1: the longest of a hundred is ten times the median.

    Raises:
        ValueError: a median below 1, or a sigma below 0.
    """

    median: float
    sigma: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.median < math.inf or not 0 <= self.sigma < math.inf:
            raise ValueError(f"expected a median of at least 1 and a sigma of at least 0, got {self}")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read ``512``, or ``512~0.8`` with a sigma; ValueError for something else."""
        median, separator, sigma = text.partition("~")
        try:
            return cls(float(median), float(sigma) if separator else 0.0)
        except ValueError:
            raise ValueError(
                f"expected a length such as 512, or 512~0.8 with a spread, got {text!r}"
            ) from None

    def draw(self, num: int, rng: np.random.Generator) -> list[int]:
        """Draw ``num`` lengths."""
        drawn = np.exp(rng.normal(math.log(self.median), self.sigma, num))
        return np.maximum(1, np.rint(drawn)).astype(int).tolist()
