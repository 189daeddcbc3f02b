"""Rules of D2LPM."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.fleet.routing import D2LPM
from tests.routing.texts import request_of

LONGEST, MOST_OUTPUTS = 12, 5


def router_of(num: int, quantum: float) -> D2LPM:
    router = D2LPM(quantum=quantum, min_cached=0)
    for replica in "abcd"[:num]:
        router.join(replica, 0.0)
    return router


def test_a_prefix_is_followed_as_long_as_there_is_credit() -> None:
    router = router_of(2, quantum=10)
    request = request_of("first", [1] * 6, "ann")
    assert router.route(request, 0.0).replica == "a"
    router.route(request_of("busy", [9], "bob"), 0.0)  # to b, so that a's queue is no shorter
    router.route(request_of("busier", [9, 9], "bob"), 0.0)
    credits = [router.credit("ann", each) for each in "ab"]
    assert credits == [4, 10]
    sent = [router.route(request_of(n, [1] * 6 + [2 + n, 3], "ann"), 0.0).replica for n in range(2)]
    assert sent == ["a", "a"]
    assert router.credit("ann", "a") == 0
    assert router.route(request_of("last", [1] * 6 + [9], "ann"), 0.0).replica == "b"


@settings(max_examples=60, deadline=None)
@given(
    num=st.integers(1, 4),
    quantum=st.sampled_from([1.0, 7.0, 40.0]),
    calls=st.lists(
        st.tuples(
            st.sampled_from(["ann", "bob"]),
            st.integers(0, 2),
            st.integers(1, LONGEST),
            st.integers(1, MOST_OUTPUTS),
            st.booleans(),
        ),
        max_size=60,
    ),
)
def test_queues_are_passed_by_with_credit_only(
    num: int, quantum: float, calls: list[tuple[str, int, int, int, bool]]
) -> None:
    router = router_of(num, quantum)
    open_ids: list[str] = []
    for number, (user, text, length, outputs, ends) in enumerate(calls):
        request = request_of(number, [text] * length, user)
        chosen = router.choose(request, 0.0)
        shortest = min(router.num_open(each) for each in router.replicas)
        if router.num_open(chosen) > shortest:
            assert router.credit(user, chosen) > 0
            assert router.num_expected(request, chosen) > 0
        assert max(router.credit(user, each) for each in router.replicas) > 0
        router.dispatched(request, chosen, 0.0)
        open_ids.append(str(number))
        if ends:
            router.finished(open_ids.pop(0), 0.0, outputs, None)
        assert all(router.credit(who, each) <= quantum for who in ("ann", "bob") for each in router.replicas)


def test_a_guess_of_what_is_cached_is_corrected_by_the_answer() -> None:
    router = router_of(1, quantum=100)
    router.route(request_of("keeps the account", [5], "ann"), 0.0)
    router.route(request_of("first", [1] * 10, "ann"), 0.0)
    router.finished("first", 1.0, 3, num_cached_tokens=0)
    assert router.credit("ann", "a") == 100 - 1 - 10 - 2 * 3
    sent = router.route(request_of("again", [1] * 10, "ann"), 1.0)
    assert sent.num_expected == 10
    assert router.credit("ann", "a") == 83
    router.finished("again", 2.0, 1, num_cached_tokens=4)
    assert router.credit("ann", "a") == 83 - 2 - 6


def test_what_is_not_answered_is_paid_back_and_debts_outlast_a_user() -> None:
    router = router_of(1, quantum=5)
    router.route(request_of("keeps the account", [5], "ann"), 0.0)
    router.route(request_of("lost", [1] * 4, "ann"), 0.0)
    router.failed("lost", 1.0)
    assert router.credit("ann", "a") == 4
    router.finished("keeps the account", 1.0, 1)
    assert router.credit("ann", "a") == 0  # what was left of the credit is gone
    router.route(request_of("long", [3] * 9, "ann"), 2.0)
    router.finished("long", 3.0, 1)
    assert router.credit("ann", "a") == 5 - 9 - 2


def test_users_who_will_never_come_back_are_forgotten() -> None:
    router = router_of(1, quantum=1)
    for number in range(1200):
        router.route(request_of("one", [1] * 9 + [number], str(number)), 0.0)
        router.finished("one", 0.0, 1)
    assert len(router._credits["a"]) == 1000
