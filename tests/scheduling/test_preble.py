"""Groups by cached share: their proportions, and how long a request of the last one waits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.request import Request
from hpu_duo.scheduling import CachedShareGroups, Waiting, make_policy
from tests.engine_host.simulated_device import make_request
from tests.scheduling.serving import CACHING, Serving

ONE_BY_ONE = replace(CACHING, max_num_seqs=1)


class Hit:
    """A hit of some tokens, in blocks of one."""

    path = ()

    def __init__(self, num_usable: int) -> None:
        self.num_usable = num_usable


class Queue:
    """Waiting requests of 20 tokens, of which some are cached, without an engine."""

    def __init__(self, policy: CachedShareGroups) -> None:
        self.policy, self.cached = policy, dict[Request, int]()
        self.waiting = Waiting(policy, lambda request: Hit(self.cached[request]))

    def add(self, num_cached: int) -> Request:
        """Queue a request."""
        request = make_request(f"r{len(self.cached)}", [1] * 20)
        request.arrival = len(self.cached)
        self.cached[request] = num_cached
        self.waiting.add(request)
        return request

    def admit(self) -> int:
        """Admit the next one, in a step of its own; returns how much of it was cached."""
        self.waiting.begin_step()
        request = self.waiting.next()
        request.num_computed_tokens = self.cached[request]
        self.waiting.admit(request)
        self.policy.admitted(request)
        return self.cached[request]


def test_each_group_gets_its_part_of_the_admissions() -> None:
    queue = Queue(CachedShareGroups())
    for _ in range(2):
        for group in range(10):
            queue.add(2 * group)
    admitted = Counter()
    for number in range(1, 551):
        admitted[group := queue.admit() // 2] += 1
        queue.add(2 * group)
        for group in range(10):
            assert abs(admitted[group] - number * (group + 1) / 55) <= 2
    assert admitted == {group: 10 * (group + 1) for group in range(10)}


@settings(max_examples=60, deadline=None)
@given(
    others=st.lists(st.integers(0, 19), min_size=70, max_size=70),
    before=st.lists(st.integers(0, 19), max_size=30),
    mine=st.integers(0, 19),
)
def test_the_earliest_request_is_overtaken_65_times_at_most(
    others: list[int], before: list[int], mine: int
) -> None:
    """Whatever was served before it came, and whatever else waits; the window holds it."""
    queue = Queue(CachedShareGroups(window=40))
    for num_cached in before:
        queue.add(num_cached)
        queue.admit()
    first = queue.add(mine)
    for num_cached in others:
        queue.add(num_cached)
    while first in queue.waiting.arrivals:
        assert queue.waiting.num_overtakes <= 65
        queue.admit()


def test_a_group_that_was_empty_saves_up_nothing() -> None:
    queue = Queue(CachedShareGroups(groups=2))
    for _ in range(40):
        queue.add(19)
    for _ in range(20):
        queue.admit()
    for _ in range(10):
        queue.add(0)
    assert Counter(queue.admit() for _ in range(15)) == {19: 10, 0: 5}


def test_cold_requests_are_served_among_those_with_a_cached_prefix() -> None:
    """In the engine's own cache: 8 of 9 tokens are group 8, nine times as often as group 0."""
    serving = Serving("preble", ONE_BY_ONE)
    serving.add("known", 1, prompt=[1] * 9)
    serving.finish()
    for number in range(30):
        serving.add(f"cold{number}", 1, prompt=[2 + number % 10, 2 + number // 10, *[7] * 7])
        serving.add(f"hot{number}", 1, prompt=[1] * 8 + [9])
    serving.admissions.clear()
    for _ in range(20):
        serving.step()
    assert sum(name.startswith("cold") for name in serving.admissions) == 2


def test_one_group_and_no_cache_are_first_come_first_served() -> None:
    for policy, limits in (
        ("preble:groups=1", ONE_BY_ONE),
        ("preble", replace(ONE_BY_ONE, caches_prefixes=False)),
    ):
        serving = Serving(policy, limits)
        for number in range(6):
            serving.add(str(number), 1, prompt=[1 + number % 2] * 9)
        assert serving.finish().admissions == list("012345")


@pytest.mark.parametrize("option", ["groups=0", "window=0"])
def test_options_below_one_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"expected {option.split('=')[0]} .*to be 1 or more.*, got"):
        make_policy(f"preble:{option}")
