"""The account of calls that Ray routes: at one replica at most, and empty when all have ended."""

from __future__ import annotations

import pickle
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.fleet.ray_serve.shared_router import SharedRouter, Ticket, announce, announced
from hpu_duo.fleet.replicas.front import RoutedCall
from hpu_duo.fleet.replicas.relaying import AnswerCounts
from hpu_duo.fleet.routing import ROUTERS, RoutedRequest, make_router

NAMES = ("a", "b", "c")


def new_router(name: str = "least-loaded", replicas: tuple[str, ...] = NAMES) -> SharedRouter:
    times = iter(range(10**6))
    router = SharedRouter(make_router(name), lambda: float(next(times)))
    router.set_replicas(replicas)
    return router


def ticket(number: int, text: str = "", **more: object) -> Ticket:
    return Ticket(RoutedCall(RoutedRequest.of_text(str(number), text), False), **more)  # type: ignore[arg-type]


def num_open(router: SharedRouter) -> dict[str, int]:
    return {each.name: each.num_open for each in router.view()}


def test_calls_that_ray_asks_for_at_the_same_time_go_to_different_replicas() -> None:
    router = new_router("round-robin")
    assert [router.rank(ticket(number), NAMES)[0] for number in range(3)] == ["a", "b", "c"]


def test_replicas_that_are_no_more_are_counted_together() -> None:
    router = new_router()
    for number in range(20):
        router.set_replicas((*NAMES[1:], f"new {number}"))
        one = ticket(number, "a prompt")
        router.sent(one, f"new {number}")
        router.set_replicas(NAMES)
        router.finished(one, AnswerCounts(num_outputs=3, num_cached_share=0.5))
        router.ended(one)
    counts = router.counts
    assert counts.requests == {"departed": 20}
    for totals in (counts.prompt_tokens, counts.expected_tokens, counts.cached_tokens):
        assert {*totals} == {"departed"}
    assert counts.prompt_tokens["departed"] == 2 * counts.cached_tokens["departed"]


def test_every_replica_is_named_so_that_ray_finds_one_with_room() -> None:
    router = new_router()
    busy = ticket(0)
    router.sent(busy, "b")
    assert router.rank(ticket(1, without=("a",)), NAMES) == ["c", "b", "a"]


def test_a_call_that_was_refused_is_asked_of_another_one() -> None:
    router, one = new_router("cache-aware"), ticket(0, "a long prompt")
    first = router.rank(one, NAMES)[0]
    second = router.rank(one, NAMES)[0]
    assert first != second
    assert sum(num_open(router).values()) == 1
    assert router.rank(ticket(1), ["b"]) == ["b"]


def test_the_account_is_of_the_replica_that_has_taken_the_call() -> None:
    router, one = new_router(), ticket(0, "four")
    chosen, other = router.rank(one, NAMES)[:2]
    router.sent(one, other)
    assert num_open(router) == {**dict.fromkeys(NAMES, 0), other: 1}
    assert one.replica == other != chosen
    assert router.counts.requests == {other: 1}
    assert router.counts.prompt_tokens == {other: 1.0}
    one.answered()
    one.finished(AnswerCounts(5, 0.5))
    one.end()
    assert router.counts.cached_tokens == {other: 0.5}
    assert set(num_open(router).values()) == {0}


def test_a_question_about_a_replica_goes_there_and_counts_nothing() -> None:
    router = new_router()
    one = ticket(0, only="b")
    assert router.rank(one, NAMES) == ["b"]
    router.sent(one, "b")
    assert not router.counts.requests
    assert set(num_open(router).values()) == {0}
    assert router.rank(ticket(1, only="gone"), NAMES) == []


def test_calls_without_a_ticket_go_to_the_shortest_queue_and_count_nothing() -> None:
    router = new_router()
    router.sent(ticket(0), "a")
    assert router.rank(None, NAMES) == ["b", "c", "a"]
    assert num_open(router) == {"a": 1, "b": 0, "c": 0}
    assert new_router(replicas=()).rank(None, NAMES) == list(NAMES)


def test_a_caller_who_has_left_before_a_replica_was_found_leaves_nothing_behind() -> None:
    router, one = new_router(), ticket(0)
    router.rank(one, NAMES)
    one.end()
    router.rank(one, NAMES)
    router.sent(one, "a")
    assert set(num_open(router).values()) == {0}


def test_no_replica_is_told_of_a_ticket() -> None:
    assert pickle.loads(pickle.dumps(ticket(0))) is None


def test_a_router_is_found_by_its_deployment() -> None:
    router = new_router()
    announce("app", "a deployment of this test", router)
    assert announced("app", "a deployment of this test") is router
    assert announced("app", "another one") is None


STEP = st.tuples(
    st.sampled_from(["rank", "sent", "answered", "finished", "end", "set", "lose"]),
    st.integers(0, 5),
    st.sampled_from(NAMES),
    st.sets(st.sampled_from(NAMES)),
)


@pytest.mark.parametrize("name", ROUTERS)
@given(steps=st.lists(STEP, max_size=40))
def test_whatever_ray_does_a_call_is_open_once_and_none_is_left(
    name: str, steps: list[tuple[str, int, str, set[str]]]
) -> None:
    router = new_router(name)
    tickets = [ticket(number, "the same beginning " * (number + 1)) for number in range(6)]
    for what, number, replica, some in steps:
        one = tickets[number]
        match what:
            case "rank":
                offered = sorted(some)
                ranked = router.rank(one, offered)
                assert set(ranked) <= set(offered)
                assert len(set(ranked)) == len(ranked)
                known = set(offered) & set(router.replicas)
                assert not known or known == set(ranked)
            case "sent":
                router.sent(one, replica)
            case "answered":
                one.answered()
            case "finished":
                one.finished(AnswerCounts(3, 0.5))
            case "end":
                one.end()
            case "set":
                router.set_replicas(sorted(some))
                assert set(router.replicas) == some
            case "lose":
                router.lose(replica)
                assert replica not in router.replicas
        assert sum(num_open(router).values()) <= sum(not each.is_over for each in tickets)
    for one in tickets:
        one.end()
        # Ray sends what it has begun to send.
        router.sent(one, "a")
    assert set(num_open(router).values()) <= {0}


def test_a_call_that_ends_while_it_is_routed_leaves_nothing_open() -> None:
    router = new_router()

    class Ending(Ticket):
        """Ends in another thread as soon as it is asked whether it is over, and says that it is not."""

        over = False

        @property
        def is_over(self) -> bool:
            was_over = self.over
            if not was_over and threading.current_thread() is threading.main_thread():
                threading.Thread(target=self.end).start()
                time.sleep(0.1)
            return was_over

        @is_over.setter
        def is_over(self, value: bool) -> None:
            self.over = value

    router.rank(Ending(ticket(1).call), NAMES)
    deadline = time.monotonic() + 30
    while sum(num_open(router).values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(num_open(router).values()) == 0
