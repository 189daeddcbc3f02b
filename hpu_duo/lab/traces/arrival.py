"""One request of a trace: its time, its length, and the blocks its prompt shares with others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


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
