"""Rules that every router keeps, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpu_duo.fleet.routing import D2LPM, E2, NoReplicaError, RoutedRequest, make_router
from hpu_duo.fleet.routing.prefix_router import PrefixRouter
from tests.routing.texts import ROUTERS, TEXTS, USERS, request_of

REPLICAS = ["a", "b", "c"]
WINDOW_S = 180.0


class Served(RuleBasedStateMachine):
    """Requests come, get tokens, end and fail, and replicas come and go."""

    @initialize(name=ROUTERS)
    def begin(self, name: str) -> None:
        self.router, self.now, self.num = make_router(name), 0.0, 0
        self.open: dict[str, tuple[RoutedRequest, str]] = {}
        self.alive: set[str] = set()
        self.ended: list[str] = []

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(replica=st.sampled_from(REPLICAS))
    def join_or_leave(self, replica: str) -> None:
        if replica not in self.alive:
            self.router.join(replica, self.now)
            self.alive.add(replica)
            return
        here = [name for name, (_, at) in self.open.items() if at == replica]
        lost = self.router.leave(replica, self.now)
        assert [each.request.request_id for each in lost] == here
        self.alive.discard(replica)
        for name in here:
            del self.open[name]
            self.ended.append(name)
        if isinstance(self.router, PrefixRouter):
            assert not any(
                replica in self.router.prefixes.held(request_of("", [each, *rest]))
                for each in (1, 2)
                for rest in ((), (1,), (2,))
            )
            assert self.router.prefixes.size(replica) == 0

    @rule(text=TEXTS, user=USERS, without=st.sets(st.sampled_from(REPLICAS), max_size=2))
    def send(self, text: list[int], user: str | None, without: set[str]) -> None:
        request = request_of(self.num, text, user)
        self.num += 1
        if not self.alive - without:
            with pytest.raises(NoReplicaError):
                self.router.choose(request, self.now, without)
            return
        chosen = self.router.choose(request, self.now, without)
        assert chosen in self.alive - without
        sent = self.router.dispatched(request, chosen, self.now)
        assert 0 <= sent.num_expected <= len(text)
        self.open[request.request_id] = (request, chosen)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), outputs=st.integers(0, 5), cached=st.one_of(st.none(), st.integers(0, 9)))
    def end(self, data: st.DataObject, outputs: int, cached: int | None) -> None:
        name = data.draw(st.sampled_from(list(self.open)))
        request, replica = self.open[name]
        what = data.draw(st.sampled_from(["first", "finished", "failed", "evicted"]))
        if what == "first":
            self.router.first_token(name, self.now)
        elif what == "evicted":
            self.router.evicted(replica, request, outputs)
            assert self.router.num_expected(request, replica) <= outputs
        else:
            if what == "failed":
                self.router.failed(name, self.now)
            else:
                most = None if cached is None else min(cached, len(request.units))
                self.router.finished(name, self.now, outputs, most)
            del self.open[name]
            self.ended.append(name)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def tell_of_what_is_over(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.ended))
        loads = [self.router.load(each, self.now) for each in self.router.replicas]
        self.router.first_token(name, self.now)
        self.router.finished(name, self.now, 3)
        self.router.failed(name, self.now)
        assert name not in self.router._open
        assert [self.router.load(each, self.now) for each in self.router.replicas] == loads

    @invariant()
    def every_request_is_at_one_replica(self) -> None:
        if hasattr(self, "router"):
            assert set(self.router.replicas) == self.alive
            assert self.router.num_open_requests == len(self.open)
            for replica in self.alive:
                here = [request for request, at in self.open.values() if at == replica]
                assert self.router.num_open(replica) == len(here)
                assert self.router.num_open_tokens(replica) == sum(map(len, (each.units for each in here)))
                assert self.router.load(replica, self.now) >= 0
            if isinstance(self.router, D2LPM):
                assert self.router._credits.keys() == self.alive

    def teardown(self) -> None:
        if not hasattr(self, "router"):
            return
        for name in [*self.open, *self.ended]:  # of what was lost with its replica as well
            self.router.finished(name, self.now, 2)
        assert self.router.num_open_requests == 0
        for replica in self.alive:
            assert self.router.num_open(replica) == 0
            assert self.router.load(replica, self.now + WINDOW_S) == 0
        if isinstance(self.router, D2LPM):
            assert not self.router._num_unfinished
            assert all(value < 0 for each in self.router._credits.values() for value in each.values())
        if isinstance(self.router, E2):
            assert not self.router._charges
            assert not self.router._first_tokens
        for replica in list(self.alive):
            self.router.leave(replica)
        if isinstance(self.router, PrefixRouter):
            assert not list(self.router.prefixes.tree)
        if isinstance(self.router, D2LPM):
            assert not self.router._credits


TestServed = Served.TestCase
TestServed.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_requests_and_replicas_that_are_there_twice_or_not_at_all_are_refused() -> None:
    router = make_router("least-loaded")
    router.join("a")
    router.route(request_of("one", [1]), 0.0)
    with pytest.raises(ValueError, match="'one' is open, at a"):
        router.dispatched(request_of("one", [1]), "a", 0.0)
    with pytest.raises(ValueError, match="one of a replicas, got 'b'"):
        router.dispatched(request_of("two", [1]), "b", 0.0)
    with pytest.raises(ValueError, match="not there yet, got 'a'"):
        router.join("a")
    with pytest.raises(ValueError, match="got 'b'"):
        router.leave("b")


@pytest.mark.parametrize(
    "name",
    [
        *("e2:window_s=0", "e2:prefill_s=0", "e2:imbalance=0.5", "e2:capacity=-1", "d2lpm:quantum=0"),
        *(
            "d2lpm:input_price=-1",
            "cache-aware:threshold=2",
            "cache-aware:uneven_times=0",
            "sticky",
            "e2:min_cached=-1",
        ),
    ],
)
def test_options_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        make_router(name)


def test_round_robin_takes_turns_and_least_loaded_the_shortest_queue() -> None:
    turns, least = make_router("round-robin"), make_router("least-loaded")
    for replica in REPLICAS:
        turns.join(replica)
        least.join(replica)
    assert [turns.route(request_of(n, [1]), 0.0).replica for n in range(5)] == ["a", "b", "c", "a", "b"]
    sent = [least.route(request_of(n, [1] * length), 0.0) for n, length in enumerate([9, 1, 5])]
    assert [each.replica for each in sent] == ["a", "b", "c"]
    least.finished("2", 1.0, 1)
    assert least.route(request_of("next", [1]), 1.0).replica == "c"
    assert least.route(request_of("behind it", [1]), 1.0).replica == "b"  # the fewest tokens


def test_text_is_compared_by_characters_and_counted_in_tokens() -> None:
    one = RoutedRequest.of_text("1", "Wörter \U0001f600 und \ud800", characters_per_token=4)
    assert len(one.units) == 14
    assert one.num_tokens == 3.5
    router = make_router("e2:min_cached=0")
    router.join("a")
    router.route(one, 0.0)
    assert router.num_expected(RoutedRequest.of_text("2", "Wörter \U0001f601"), "a") == 7


@pytest.mark.parametrize(("names", "most"), [("abc", 8), ("ab", 18)])
def test_cache_aware_leaves_a_queue_for_an_idle_replica(names: str, most: int) -> None:
    router, begin = make_router("cache-aware"), [1] * 2048
    for replica in names:
        router.join(replica)
    for number in range(most + 1):
        assert router.route(request_of(number, [*begin, 2 + number]), 0.0).replica == "a"
    assert router.choose(request_of("other", [5] * 400), 0.0) != "a", "it is not cached there"
    assert router.choose(request_of("next", [*begin, 99]), 0.0) != "a"
    router.finished("0", 1.0, 1)
    assert router.choose(request_of("next", [*begin, 99]), 1.0) == "a"


def test_cache_aware_prefers_replicas_that_have_computed_a_prefix() -> None:
    router, begin = make_router("cache-aware"), [1] * 2048
    for number, replica in enumerate("ab"):
        router.join(replica)
        router.dispatched(request_of(number, [*begin, 2 + number]), replica, 0.0)
    router.first_token("0", 1.0)
    router.dispatched(request_of("more", [*begin, 9]), "a", 1.0)
    assert router.choose(request_of("next", [*begin, 99]), 1.0) == "a"
    router.first_token("1", 2.0)
    assert router.choose(request_of("next", [*begin, 99]), 2.0) == "b"


def test_an_answer_that_had_much_less_cached_corrects_what_is_believed() -> None:
    router, begin = make_router("cache-aware"), [1] * 800
    router.join("a")
    for name, tail in enumerate([[2], [3], [4]]):
        router.route(request_of(name, begin + tail), float(name))
    router.finished("2", 3.0, 1, num_cached_tokens=500)  # a little less
    assert router.num_expected(request_of("", [*begin, 2]), "a") == 801
    router.route(request_of("5", [*begin, 5]), 4.0)
    router.finished("5", 5.0, 1, num_cached_tokens=200)
    assert router.num_expected(request_of("", [*begin, 2]), "a") == 800
    assert router.num_expected(request_of("", [*begin, 5]), "a") == 801


@pytest.mark.parametrize("name", ["e2", "d2lpm", "cache-aware"])
def test_chats_that_begin_alike_for_less_than_a_block_leave_what_others_hold(name: str) -> None:
    def chat(number: int, text: str) -> RoutedRequest:
        return RoutedRequest.of_text(f"{name} {number}", f'[{{"role":"user","content":"{text}')

    router = make_router(name)
    router.join("a")
    document = chat(0, "A long document. " * 500)
    router.route(document, 0.0)
    router.finished(document.request_id, 1.0, 5, num_cached_tokens=0.0)
    router.route(chat(1, "Hello"), 2.0)
    router.finished(f"{name} 1", 3.0, 5, num_cached_tokens=0.0)
    assert router.num_expected(document, "a") == len(document.units)


@pytest.mark.parametrize("name", ["e2", "d2lpm", "cache-aware"])
def test_what_a_router_remembers_is_bounded_if_nobody_says_how_much(name: str) -> None:
    router = make_router(name)
    assert isinstance(router, PrefixRouter)
    router.join("a")
    for number in range(9):
        request = request_of(number, [number] * 500_000)
        router.route(request, float(number))
        router.finished(str(number), number + 0.5, 1)
    assert router.prefixes.size("a") == 4_000_000
