"""No call of a router does more for the many prompts that its map has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from hpu_duo.fleet.routing import Router, make_router
from hpu_duo.fleet.routing.prefix_map import SpreadDict
from hpu_duo.fleet.routing.prefix_router import PrefixRouter
from tests.routing.texts import request_of

REPLICAS = "abcd"
MOST_CALLS = 1500
"""Functions, built-in ones included, that one call of a router may call."""
SYSTEM_LEN, OWN_LEN = 300, 12


def num_calls(call: Callable[..., Any], *given: object) -> tuple[Any, int]:
    """The result of a call, and the number of functions that it called."""
    num = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = call(*given)
    finally:
        sys.setprofile(None)
    return found, num


def prompt(number: int) -> list[int]:
    """One of 1,500 that begin alike, and part there."""
    return [1] * SYSTEM_LEN + [2 + number % 1500] * OWN_LEN


def steps(router: Router, num: int) -> Iterator[tuple[str, int]]:
    """Serve requests; yields the name of each call and how many functions it called."""
    for number in range(num):
        now, request = number / 10, request_of(number, prompt(number))
        chosen, called = num_calls(router.choose, request, now)
        yield "choose", called
        yield "dispatched", num_calls(router.dispatched, request, chosen, now)[1]
        yield "first_token", num_calls(router.first_token, str(number), now)[1]
        cached = 0.0 if number % 100 == 99 else float(SYSTEM_LEN)
        yield "finished", num_calls(router.finished, str(number), now, 5, cached)[1]


@pytest.mark.parametrize("name", ["e2", "e2:capacity=5000", "d2lpm", "cache-aware:capacity=5000"])
def test_no_call_visits_all_that_the_map_has(name: str) -> None:
    router = make_router(name)
    assert isinstance(router, PrefixRouter)
    for replica in REPLICAS:
        router.join(replica)
    most = max(steps(router, 3000), key=lambda each: each[1])
    assert most[1] <= MOST_CALLS, most
    long = request_of("long", [7] * 5000)  # evicts all others where there is little room
    found = [
        ("long", num_calls(router.dispatched, long, "a", 300.0)[1]),
        ("evicted", num_calls(router.evicted, "b", request_of("", [1] * SYSTEM_LEN), 0)[1]),
        ("after an hour", num_calls(router.choose, long, 4000.0)[1]),
        ("leave", num_calls(router.leave, "c", 4000.0)[1]),
    ]
    assert all(num <= MOST_CALLS for _, num in found), found
    assert router.prefixes.held(request_of("", prompt(1))).keys() <= {"a", "d"}


@pytest.mark.parametrize("name", ["e2", "d2lpm", "least-loaded"])
def test_a_replica_leaves_in_the_same_time_however_many_requests_are_open(name: str) -> None:
    router = make_router(name)
    for replica in "ab":
        router.join(replica)
    for number in range(2000):
        router.dispatched(request_of(number, prompt(number), str(number)), "ab"[number % 2], 0.0)
    lost, called = num_calls(router.leave, "a", 1.0)
    assert (len(lost), router.num_open_requests) == (1000, 1000)
    assert called <= MOST_CALLS
    router.join("a", 1.0)
    again = router.dispatched(lost[0].request, "a", 1.0)
    for each in lost:
        router.first_token(each.request.request_id, 2.0)
        assert num_calls(router.finished, each.request.request_id, 2.0, 3)[1] <= MOST_CALLS
    assert again.has_token
    assert (len(router._open), router.num_open("a"), router.num_open_tokens("a")) == (1000, 0, 0.0)


def test_what_a_call_has_left_is_forgotten_by_later_ones() -> None:
    router = make_router("d2lpm:capacity=5000")
    assert isinstance(router, PrefixRouter)
    router.join("a")
    router.join("b")
    for number in range(150):
        router.dispatched(request_of(number, prompt(number)), "ab"[number % 2], float(number))
    held = router.prefixes
    router.evicted("a", request_of("", prompt(0)), 100)
    assert held.size("a") > 100
    assert held.held(request_of("", prompt(2))) == {"a": 100, "b": SYSTEM_LEN}
    router.dispatched(request_of("long", [7] * 4950), "b", 1000.0)
    for number in range(20):
        router.dispatched(request_of(f"later {number}", [9, number]), "b", 1001.0)
    assert held.size("a") == 100
    assert held.size("b") <= held.capacity
    router.leave("a")
    router.leave("b")
    for _ in range(20):
        router.prefixes._forget_some()
    assert not list(held.tree)


def test_a_spread_dictionary_is_a_dictionary() -> None:
    spread = SpreadDict({number: str(number) for number in range(1000)})
    spread[7] = "seven"
    del spread[8]
    assert dict(spread) == {number: str(number) for number in range(1000) if number != 8} | {7: "seven"}
    assert (len(spread), bool(spread), spread.get(8), bool(SpreadDict())) == (999, True, None, False)
    assert sorted(spread.values()) == sorted(dict(spread).values())


def test_a_snapshot_is_not_changed_by_what_comes_after_it() -> None:
    spread = SpreadDict({number: str(number) for number in range(1000)})
    before, snapshot = sorted(spread.values()), spread.snapshot()
    found = [next(snapshot) for _ in range(10)]
    for number in range(1000):
        del spread[number]
        spread[number + 1000] = "new"
    assert (sorted([*found, *snapshot]), set(spread.values())) == (before, {"new"})
