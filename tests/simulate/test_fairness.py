"""Differences of service, against their definition written out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.lab.simulate.fairness import Fairness, ServiceLine, common, drift_by, waiting_intervals
from hpu_duo.lab.simulate.run_log import RequestRecord, ServiceLog

END = 30.0
times_strategy = st.integers(0, 30).map(float)
spans = st.tuples(times_strategy, times_strategy).map(sorted).map(tuple)
waits = st.lists(st.tuples(st.sampled_from("ab"), spans), max_size=8)
served = st.lists(st.tuples(times_strategy, st.sampled_from("ab"), st.integers(1, 9)), max_size=25)


def log_of(entries: list[tuple[float, str, int]]) -> ServiceLog:
    ordered = sorted(entries)
    return ServiceLog([each[0] for each in ordered], [each[1] for each in ordered], [e[2] for e in ordered])


def records_of(found: list[tuple[str, tuple[float, float]]]) -> list[RequestRecord]:
    return [RequestRecord(user, arrived=span[0], started=span[1]) for user, span in found]


def waits_at(found: list[tuple[str, tuple[float, float]]], user: str, time: float) -> bool:
    return any(name == user and span[0] <= time < span[1] for name, span in found)


@given(waits=waits, served=served)
@settings(max_examples=150, deadline=None)
def test_the_largest_difference_is_that_of_any_span_in_which_both_wait(
    waits: list[tuple[str, tuple[float, float]]], served: list[tuple[float, str, int]]
) -> None:
    def got(user: str, begin: float, end: float) -> int:
        return sum(amount for time, name, amount in served if name == user and begin < time <= end)

    borders = [float(at) for at in range(31)]
    expected = 0
    for first in borders:
        for last in borders:
            inside = [at + 0.5 for at in range(int(first), int(last))]
            both = inside and all(waits_at(waits, "a", at) and waits_at(waits, "b", at) for at in inside)
            if both:
                expected = max(expected, abs(got("a", first, last) - got("b", first, last)))
    fairness = Fairness.of(records_of(waits), log_of([e for e in served if waits_of(waits, e[1])]), END)
    assert fairness.largest_difference == expected
    assert (fairness.pair is None) == (expected == 0)
    values = [value for _, value in fairness.growth]
    assert values == sorted(values)
    assert values[-1] == expected


def waits_of(found: list[tuple[str, tuple[float, float]]], user: str) -> bool:
    return any(name == user for name, _ in found)


@given(waits=waits)
def test_waiting_intervals_are_the_times_at_which_something_waits(
    waits: list[tuple[str, tuple[float, float]]],
) -> None:
    found = waiting_intervals(records_of(waits), "a", END)
    for at in np.arange(0.25, 30, 0.5):
        assert waits_at(waits, "a", at) == any(begin <= at < end for begin, end in found)
    assert all(one[1] < other[0] for one, other in pairwise(found))
    never = RequestRecord("a", arrived=5.0)
    assert waiting_intervals([never], "a", END) == [(5.0, END)]


def test_common_spans_and_their_borders() -> None:
    assert common([(0, 4), (6, 9)], [(1, 2), (3, 7), (8, 20)]) == [(1, 2), (3, 4), (6, 7), (8, 9)]
    assert common([(0, 1)], [(1, 2)]) == []


def test_drift_does_not_count_what_was_got_before_the_span() -> None:
    one = ServiceLine(np.array([1.0, 5.0]), np.array([100.0, 107.0]))
    other = ServiceLine(np.array([6.0]), np.array([3.0]))
    times = np.array([0.0, 4.0, 5.0, 6.0])
    assert drift_by(times, one, other, (2.0, 10.0)).tolist() == [0.0, 0.0, 7.0, 7.0]
