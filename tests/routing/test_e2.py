"""Rules of E2."""

from __future__ import annotations

from math import inf

import pytest

from hpu_duo.fleet.routing import E2
from hpu_duo.fleet.routing.e2 import WindowLoad
from tests.routing.texts import request_of


def router_of(*replicas: str, **options: float) -> E2:
    router = E2(**{"min_cached": 0.0, **options})  # type: ignore[arg-type]
    for replica in replicas:
        router.join(replica, 0.0)
    return router


def send(router: E2, name: str, tokens: list[int], replica: str, now: float = 0.0) -> None:
    router.dispatched(request_of(name, tokens), replica, now)


@pytest.mark.parametrize(("num_own", "chosen"), [(9, "a"), (10, "b")])
def test_a_prefix_is_exploited_when_it_is_more_than_the_rest(num_own: int, chosen: str) -> None:
    router = router_of("a", "b", imbalance=inf)
    send(router, "first", [1] * 10, "a")
    assert router.choose(request_of("next", [1] * 10 + [2] * num_own), 0.0) == chosen


def test_of_replicas_with_the_same_prefix_the_one_with_the_least_work_is_taken() -> None:
    router = router_of("a", "b", "c", imbalance=inf)
    for name, replica in enumerate("abba"):
        send(router, str(name), [1] * 10, replica)
    send(router, "more", [5], "a")
    assert router.choose(request_of("next", [1] * 10 + [2]), 0.0) == "b"


def test_work_counts_within_the_window_and_by_what_was_computed() -> None:
    router = router_of("a", window_s=10.0, prefill_s=1.0)
    send(router, "one", [1] * 8, "a", now=1.0)
    router.first_token("one", 2.0)
    router.finished("one", 8.0, num_outputs=4, num_cached_tokens=6)
    assert router.load("a", 8.0) == pytest.approx(2 * 1.0 + 4 * 2.0)
    send(router, "two", [2] * 4, "a", now=9.0)
    router.failed("two", 9.5)
    assert router.load("a", 10.9) == pytest.approx(10.0)
    assert router.load("a", 11.0) == 0.0


def test_evicting_what_is_used_costs_more_than_evicting_what_is_not() -> None:
    router = router_of("a", "b", capacity=20, prefill_s=1.0, imbalance=inf)
    for name in range(4):
        send(router, f"a{name}", [1] * 20, "a", now=float(name))
        send(router, f"b{name}", [10 + name] * 20, "b", now=float(name))
    request = request_of("new", [99] * 10)
    costs = [router.eviction_s(each, request, 10, 4.0) for each in "ab"]
    assert costs == pytest.approx([10 * 4 / 8, 10 * 1 / 8])
    grown = [router.eviction_s("a", request, num, 4.0) for num in range(25)]
    assert grown == sorted(grown)
    assert router.eviction_s("a", request, 10, 300.0) == 0.0  # the window has passed


def test_a_prefix_that_fills_its_replica_gets_another_one() -> None:
    router = router_of("a", "b", "c", prefill_s=0.1)
    send(router, "b", [7], "b")
    request = request_of("next", [1] * 10)
    send(router, "0", [1] * 10, "a")  # 5.8 s of work, and 1 s is what it would take elsewhere
    assert router.choose(request, 0.0) == "c"
    router.dispatched(request, "c", 0.0)
    assert router.num_expected(request_of("later", [1] * 10), "c") == 10
    rare = router_of("a", "b", "c", prefill_s=0.1)
    send(rare, "0", [1] * 10, "a")
    for name in range(9):
        send(rare, f"other {name}", [2 + name], "a")
        rare.finished(f"other {name}", 1.0, 9)
    assert rare.choose(request, 1.0) == "a"  # a tenth of the requests, and an even share is a third


def test_open_requests_outweigh_what_is_cached_when_there_are_many() -> None:
    router = router_of("a", "b", prefill_s=0.01)
    for name in range(9):
        send(router, f"other {name}", [2 + name], "a")
    send(router, "holds it", [1] * 12, "a")
    assert router.wait_s("a") == pytest.approx(21 * 0.01 + 10 * 0.15 * 0.15 * 32)
    assert router.choose(request_of("next", [1] * 12), 0.0) == "b"
    for name in range(9):
        router.failed(f"other {name}", 0.0)
    assert router.choose(request_of("next", [1] * 12), 0.0) == "a"


def test_a_popular_prefix_of_no_worth_is_spread_over_all_replicas() -> None:
    router = router_of(*"abcd", min_cached=256)
    sent = []
    for name in range(400):
        now = float(name)
        chosen = router.route(request_of(name, [1] * 200 + [2 + name] * 9), now).replica
        sent.append(chosen)
        router.first_token(str(name), now + 0.1)
        router.finished(str(name), now + 0.5, 9)
    assert max(map(sent.count, "abcd")) <= 1.5 * 100


def test_less_than_what_matters_is_not_cached() -> None:
    router = router_of("a", "b", min_cached=256)
    send(router, "one", [1] * 255 + [2], "a")
    assert router.num_expected(request_of("next", [1] * 255), "a") == 0
    assert router.num_expected(request_of("next", [1] * 255 + [2]), "a") == 256
    assert router.choose(request_of("next", [1] * 255), 0.0) == "b"


def test_a_prefix_whose_requests_wait_longer_and_longer_gets_another_replica() -> None:
    router = router_of("a", "b", growth=2.0, imbalance=inf)
    send(router, "splits what they share off", [1] * 10 + [99], "a")
    for name in range(16):
        at = float(name)
        send(router, str(name), [1] * 10 + [2 + name], "a", at)
        router.first_token(str(name), at + (1.0 if name < 8 else 2.0))
        router.finished(str(name), at + 3.0, 2)
    request = request_of("next", [1] * 10)
    assert router.choose(request, 20.0) == "b"
    assert router.choose(request, 20.0) == "a"  # hot once, until it is so again


def test_a_replica_that_joins_late_is_not_sent_everything() -> None:
    work = WindowLoad(10.0)
    for replica in "ab":
        work.join(replica, 0.0)
    work.charge("a", 1.0, 6.0)
    work.charge("b", 1.0, 4.0)
    work.join("c", 5.0)
    assert work.seconds("c", 5.0) == 4.0
    assert [work.seconds(each, 15.0) for each in "abc"] == [0.0, 0.0, 0.0]
