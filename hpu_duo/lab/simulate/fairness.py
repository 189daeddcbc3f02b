"""Service of users compared while they competed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hpu_duo.lab.simulate.run_log import RequestRecord, ServiceLog

MOST_USERS = 32
"""Users whose service is compared pair by pair: those with most requests."""
_NUM_POINTS = 201

Interval = tuple[float, float]


@dataclass(frozen=True)
class Fairness:
    """Service of users, by ``ServiceLog``, while several of them had requests that waited to start.

    Attributes:
        service: of each user in all, the users with most requests first.
        largest_difference: the largest difference between what two users got in any span of time throughout
            which requests of both waited; 0 where that never was.
        pair: these two users; None for a difference of 0.
        num_compared: users that were compared, at most ``MOST_USERS``.
        growth: pairs of a time and of ``largest_difference`` as it was by then, evenly spaced.
    """

    service: dict[str, int]
    largest_difference: float
    pair: tuple[str, str] | None
    num_compared: int
    growth: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, records: Iterable[RequestRecord], service: ServiceLog, end: float) -> Fairness:
        """Compare the users of a run.

        Args:
            end: of the run.
        """
        records = list(records)
        counts = Counter(each.user for each in records)
        names = [name for name, _ in counts.most_common()]
        totals = dict.fromkeys(names, 0)
        for user, amount in zip(service.users, service.amounts):
            totals[user] += amount
        compared = names[:MOST_USERS]
        lines = {name: ServiceLine.of(service, name) for name in compared}
        waits = {name: waiting_intervals(records, name, end) for name in compared}
        times = np.linspace(0.0, end, _NUM_POINTS)
        growth, pair = np.zeros(_NUM_POINTS), None
        for one, other in combinations(compared, 2):
            for span in common(waits[one], waits[other]):
                found = drift_by(times, lines[one], lines[other], span)
                if found[-1] > growth[-1]:
                    pair = (one, other)
                growth = np.maximum(growth, found)
        return cls(
            totals,
            float(growth[-1]),
            pair,
            len(compared),
            tuple(zip(times.tolist(), growth.tolist())),
        )


@dataclass(frozen=True)
class ServiceLine:
    """Service of one user since the beginning, as a function of time that rises in steps.

    Attributes:
        times: of the rises, float64 ``[n]``, ascending.
        totals: behind each, float64 ``[n]``.
    """

    times: NDArray[np.float64]
    totals: NDArray[np.float64]

    @classmethod
    def of(cls, service: ServiceLog, user: str) -> ServiceLine:
        """Return the line of a user."""
        chosen = [at for at, name in enumerate(service.users) if name == user]
        times = np.array([service.times[at] for at in chosen], dtype=np.float64)
        return cls(times, np.cumsum([service.amounts[at] for at in chosen], dtype=np.float64))

    def at(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the service up to and including each time; float64 ``[len(times)]``."""
        return np.concatenate([[0.0], self.totals])[np.searchsorted(self.times, times, side="right")]


def waiting_intervals(records: Iterable[RequestRecord], user: str, end: float) -> list[Interval]:
    """Return the spans of time in which at least one request of a user had come and not started."""
    changes = []
    for record in records:
        if record.user == user:
            changes += [(record.arrived, 1), (end if record.started is None else record.started, -1)]
    # At the same time requests come first: no gap is seen where one starts as the next one comes.
    changes.sort(key=lambda change: (change[0], -change[1]))
    found: list[Interval] = []
    num_waiting, begun = 0, 0.0
    for time, change in changes:
        if not num_waiting:
            begun = time
        num_waiting += change
        if not num_waiting and time > begun:
            found.append((begun, time))
    return found


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the spans in both of two lists of spans that are in order and do not overlap."""
    found, at, there = [], 0, 0
    while at < len(one) and there < len(other):
        begin, end = max(one[at][0], other[there][0]), min(one[at][1], other[there][1])
        if begin < end:
            found.append((begin, end))
        if one[at][1] < other[there][1]:
            at += 1
        else:
            there += 1
    return found


def drift_by(
    times: NDArray[np.float64], one: ServiceLine, other: ServiceLine, span: Interval
) -> NDArray[np.float64]:
    """Return the largest difference of what two users got in any part of a span, as it was by each time.

    Args:
        times: float64 ``[n]``, ascending.

    Returns:
        float64 ``[n]``, ascending; 0 before the span.
    """
    inside = [line.times[(line.times > span[0]) & (line.times <= span[1])] for line in (one, other)]
    rises = np.sort(np.concatenate([[span[0]], *inside]))
    drift = one.at(rises) - other.at(rises)
    largest = np.maximum.accumulate(np.maximum.accumulate(drift) - np.minimum.accumulate(drift))
    return np.concatenate([[0.0], largest])[np.searchsorted(rises, times, side="right")]
