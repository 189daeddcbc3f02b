"""The rank that ended all ranks, of what rank 0 knows of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

_WORDS_OF_EXCHANGES = re.compile(
    r"connection|peer|timed? ?out|broken pipe|socket|gloo|nccl|hccl|collective|\bDist\w*Error", re.IGNORECASE
)
_ALIVE_S = 1.5
"""Most seconds without a sign of life of a rank that is taken to live."""
UNKNOWN_S = 1.0
"""Seconds that late ranks have in addition where it is not known which of them the others wait for."""


@dataclass(frozen=True)
class Report:
    """Error that a rank has told of before it ended.

    Attributes:
        rank: number of the rank.
        message, trace: the error in one line, and with its traceback.
        may_follow: whether exchanges raise errors of such a type where another rank is gone or late.
    """

    rank: int
    message: str
    trace: str
    may_follow: bool

    @property
    def names_an_exchange(self) -> bool:
        """Whether its words are those of an exchange that others take no part in."""
        return self.may_follow and _WORDS_OF_EXCHANGES.search(self.message) is not None

    @property
    def failure(self) -> str:
        """The error as that of a rank that has failed by itself."""
        return f"failed: {self.message}\n{self.trace}".rstrip()


@dataclass(frozen=True)
class Signs:
    """The knowledge that rank 0 has of all ranks.

    Attributes:
        size: number of ranks.
        reports: errors, in the order in which they came.
        gone: ranks whose process has ended without a word that it would.
        silent_s: seconds since each rank's last sign of life.
        num_done: orders that each rank has carried out, as far as it has told.
        late_s: seconds that each rank has been at the same step.
        waiting: ranks that were last inside an exchange with others.
    """

    size: int
    reports: tuple[Report, ...] = ()
    gone: frozenset[int] = frozenset()
    silent_s: Mapping[int, float] = field(default_factory=dict)
    num_done: Mapping[int, int] = field(default_factory=dict)
    late_s: Mapping[int, float] = field(default_factory=dict)
    waiting: frozenset[int] = frozenset()

    def with_report(self, report: Report | None) -> Signs:
        """Return the signs with one report more, behind the others."""
        if report is None:
            return self
        return replace(self, reports=(*self.reports, report))

    def are_bad(self, timeout_s: float) -> bool:
        """Whether ranks cannot go on.

        Args:
            timeout_s: most seconds of silence, and of a step.
        """
        longest_s = max((*self.silent_s.values(), *self.late_s.values()), default=0.0)
        return bool(self.reports or self.gone or longest_s > timeout_s)


class Blamed(NamedTuple):
    """The rank that failed first.

    Attributes:
        rank: number of the rank.
        told: its error, or why it is taken for hung; None if its process has ended without a word.
    """

    rank: int
    told: str | None


def blamed(signs: Signs, timeout_s: float, *, is_all: bool) -> Blamed | None:
    """Return the rank that failed first, once that is known.

    An error of its own comes first, then a process that has ended without a word, then silence, then a step
    that does not end: of the ranks that are late, the one that does not wait for others. Where there are only
    errors that may follow from another rank's end or delay, the first one that is not in the words of an
    exchange is a rank's own. Where all are, a rank that has told of none hangs, and others have waited for it
    in vain: rank 0, or the one that has done the least.

    Args:
        timeout_s: most seconds of silence, and of a step.
        is_all: whether every rank that fails has had the time to report it.
    """
    own = next((each for each in signs.reports if not each.may_follow), None)
    if own is not None:
        return Blamed(own.rank, own.failure)
    reported = {each.rank for each in signs.reports}
    without_word = sorted(signs.gone - reported)
    if without_word:
        return Blamed(without_word[0], None)
    silent = {rank: silence for rank, silence in signs.silent_s.items() if silence > timeout_s}
    waited_for = {rank: silence for rank, silence in silent.items() if rank not in reported} or silent
    if waited_for:
        rank = max(waited_for, key=waited_for.__getitem__)
        return Blamed(rank, f"gave no sign of life for {waited_for[rank]:.0f} s")
    if not reported:
        return _late(signs, timeout_s)
    if not is_all:
        return None
    likely = next((each for each in signs.reports if not each.names_an_exchange), None)
    if likely is not None:
        return Blamed(likely.rank, likely.failure)
    first, others = signs.reports[0], [each for each in range(signs.size) if each not in reported]
    if others:
        hung = min(others, key=lambda each: (each in signs.waiting, each > 0, signs.num_done.get(each, 0)))
        return Blamed(
            hung, f"hangs: rank {first.rank} waited for it in vain ({first.message})\n{first.trace}".rstrip()
        )
    return Blamed(first.rank, first.failure)


def _late(signs: Signs, timeout_s: float) -> Blamed | None:
    """Return the rank whose step does not end, if that is known, or nobody has said more for some time."""
    late = {
        rank: late_s
        for rank, late_s in signs.late_s.items()
        # Of one that is silent as well, silence is reported in a moment.
        if late_s > timeout_s and signs.silent_s.get(rank, 0.0) <= _ALIVE_S
    }
    busy = sorted(late.keys() - signs.waiting)
    if len(busy) != 1 and max(late.values(), default=0.0) <= timeout_s + UNKNOWN_S:
        return None
    first, *others = sorted(busy or late, key=lambda rank: (signs.num_done.get(rank, 0), rank))
    like = f", as has rank {', '.join(map(str, others))}" if others else ""
    return Blamed(first, f"hangs: it has been at a step for {late[first]:.0f} s{like}")
