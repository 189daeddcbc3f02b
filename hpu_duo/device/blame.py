"""The rank that ended all ranks, of what rank 0 knows of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Report:
    """Error that a rank has told of before it ended.

    Attributes:
        rank: number of the rank.
        message, trace: the error in one line, and with its traceback.
        may_follow: whether exchanges raise such an error where another rank is gone or late.
    """

    rank: int
    message: str
    trace: str
    may_follow: bool


@dataclass(frozen=True)
class Signs:
    """The knowledge that rank 0 has of all ranks.

    Attributes:
        size: number of ranks.
        reports: errors, in the order in which they came.
        gone: ranks whose process has ended without a word that it would.
        silent_s: seconds since each rank's last sign of life.
        num_done: orders that each rank has carried out, as far as it has told.
    """

    size: int
    reports: tuple[Report, ...] = ()
    gone: frozenset[int] = frozenset()
    silent_s: Mapping[int, float] = field(default_factory=dict)
    num_done: Mapping[int, int] = field(default_factory=dict)

    def with_report(self, report: Report | None) -> Signs:
        """Return the signs with one report more, behind the others."""
        if report is None:
            return self
        return replace(self, reports=(*self.reports, report))

    def are_bad(self, timeout_s: float) -> bool:
        """Whether ranks cannot go on.

        Args:
            timeout_s: most seconds of silence.
        """
        return bool(self.reports or self.gone or max(self.silent_s.values(), default=0.0) > timeout_s)


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

    An error of its own comes first, then a process that has ended without a word, then silence. Where there
    are only errors that follow from another rank's end or delay, a rank that has told of none hangs, and
    others have waited for it in vain: rank 0, or the one that has done the least.

    Args:
        timeout_s: most seconds of silence.
        is_all: whether every rank that fails has had the time to say so.
    """
    own = next((each for each in signs.reports if not each.may_follow), None)
    if own is not None:
        return Blamed(own.rank, f"failed: {own.message}\n{own.trace}".rstrip())
    reported = {each.rank for each in signs.reports}
    without_word = sorted(signs.gone - reported)
    if without_word:
        return Blamed(without_word[0], None)
    silent = {rank: silence for rank, silence in signs.silent_s.items() if silence > timeout_s}
    waited_for = {rank: silence for rank, silence in silent.items() if rank not in reported} or silent
    if waited_for:
        rank = max(waited_for, key=waited_for.__getitem__)
        return Blamed(rank, f"gave no sign of life for {waited_for[rank]:.0f} s")
    if not reported or not is_all:
        return None
    first, others = signs.reports[0], [each for each in range(signs.size) if each not in reported]
    if others:
        hung = min(others, key=lambda each: (each > 0, signs.num_done.get(each, 0)))
        return Blamed(hung, f"hangs: rank {first.rank} waited for it in vain ({first.message})")
    return Blamed(first.rank, f"failed: {first.message}\n{first.trace}".rstrip())
