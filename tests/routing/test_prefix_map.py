"""The map of who holds which prefix, against a list of all prompts."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hpu_duo.fleet.routing import PrefixMap
from hpu_duo.fleet.routing.prefix_map import RadixNode, num_common
from tests.routing.texts import TEXTS, common, request_of

REPLICAS = st.sampled_from(["a", "b", "c"])


def held_by(held: PrefixMap, node: RadixNode) -> dict[str, float]:
    """Replicas that hold a node, with the time of the last use; not those that were forgotten."""
    return {held._replicas[life]: use.used for life, use in node.holders.items() if life in held._replicas}


class Prompts(RuleBasedStateMachine):
    """Replicas are sent prompts, and forget: the map is compared with the prompts themselves."""

    @initialize(capacity=st.sampled_from([inf, inf, 0, 3, 8]))
    def begin(self, capacity: float) -> None:
        self.map, self.now = PrefixMap(capacity), 0.0
        # Prefixes of each replica with the time of the last use: what an infinite cache would hold.
        self.used: dict[str, dict[tuple[int, ...], float]] = {"a": {}, "b": {}, "c": {}}

    @rule(replica=REPLICAS, text=TEXTS, passed=st.sampled_from([0.0, 1.0]))
    def add(self, replica: str, text: list[int], passed: float) -> None:
        self.now += passed
        self.map.add(replica, request_of("", text), self.now)
        for end in range(1, len(text) + 1):
            self.used[replica][tuple(text[:end])] = self.now

    @rule(replica=REPLICAS, text=TEXTS, num_kept=st.integers(0, 9), since=st.sampled_from([-inf, -inf, 0.0]))
    def keep_only(self, replica: str, text: list[int], num_kept: int, since: float) -> None:
        before = self.now - since
        self.map.keep_only(replica, request_of("", text), num_kept, before)
        gone = text[: num_kept + 1]
        if len(gone) > num_kept:
            used = self.used[replica]
            for prefix in [each for each in used if list(each[: len(gone)]) == gone]:
                if used[prefix] < before:
                    del used[prefix]

    @rule(replica=REPLICAS)
    def forget(self, replica: str) -> None:
        self.map.forget(replica)
        self.used[replica].clear()

    @rule(replica=REPLICAS, num=st.integers(0, 12))
    def look_at_what_would_go(self, replica: str, num: int) -> None:
        size = self.map.size(replica)
        found = self.map.least_used(replica, num)
        assert sum(each for _, each in found) == min(num, size)
        assert self.map.size(replica) == size
        assert found == self.map.least_used(replica, num)
        ends = [held_by(self.map, node)[replica] for node, _ in found]
        assert ends == sorted(ends)

    @rule(text=TEXTS)
    def look_up(self, text: list[int]) -> None:
        held = self.map.held(request_of("", text))
        for replica, used in self.used.items():
            longest = max((common(text, each) for each in used), default=0)
            if self.map.capacity == inf:
                assert held.get(replica, 0) == longest
            else:
                assert held.get(replica, 0) <= longest

    @invariant()
    def sizes_are_those_of_the_tree(self) -> None:
        if not hasattr(self, "map"):
            return
        for replica, used in self.used.items():
            size = sum(len(node.label) for node in self.map.tree if replica in held_by(self.map, node))
            assert self.map.size(replica) == size <= self.map.capacity
            if self.map.capacity == inf:
                assert size == len(used)

    @invariant()
    def whoever_holds_a_prefix_holds_its_parents(self) -> None:
        if not hasattr(self, "map"):
            return
        for node in self.map.tree:
            assert node.holders
            assert len(node.label)
            assert node.parent is not None
            for replica, used in held_by(self.map, node).items():
                if node.start:
                    assert held_by(self.map, node.parent)[replica] >= used
            for first, child in node.children.items():
                assert (child.parent, child.start, int(child.label[0])) == (node, node.end, first)


TestPrompts = Prompts.TestCase
TestPrompts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(first=TEXTS, second=TEXTS)
def test_common_prefixes_are_counted(first: list[int], second: list[int]) -> None:
    one, other = request_of("", first).units, request_of("", second).units
    assert num_common(one, other) == common(first, second)


@pytest.mark.parametrize("num_kept", range(7))
def test_a_hint_leaves_as_much_as_the_replica_has_kept(num_kept: int) -> None:
    held = PrefixMap()
    held.add("a", request_of("", [1, 2, 3, 4, 5]), 0.0)
    held.add("b", request_of("", [1, 2, 3, 4, 5]), 0.0)
    held.add("a", request_of("", [1, 2, 9]), 0.0)
    held.keep_only("a", request_of("", [1, 2, 3, 4, 5]), num_kept)
    assert held.held(request_of("", [1, 2, 3, 4, 5])).get("a", 0) == min(num_kept, 5)
    assert held.held(request_of("", [1, 2, 9])).get("a", 0) == (3 if num_kept >= 2 else num_kept)
    assert held.held(request_of("", [1, 2, 3, 4, 5]))["b"] == 5


def test_namespaces_share_nothing() -> None:
    held = PrefixMap()
    one = request_of("", [1, 2, 3])
    held.add("a", one, 0.0)
    salted = type(one)("", one.units, namespace="salt")
    assert held.held(salted) == {}
    held.add("b", salted, 0.0)
    assert held.held(one) == {"a": 3}


def test_the_least_recently_used_units_are_forgotten_first() -> None:
    held = PrefixMap(capacity=6)
    held.add("a", request_of("", [1, 1, 1]), 0.0)
    held.add("a", request_of("", [2, 2, 2]), 1.0)
    held.add("a", request_of("", [1, 1, 1]), 2.0)
    held.add("a", request_of("", [1, 1, 2, 2]), 3.0)
    assert held.held(request_of("", [2, 2, 2])) == {"a": 1}
    assert held.held(request_of("", [1, 1, 1])) == {"a": 3}


def test_what_a_replica_held_goes_by_and_by_and_is_unknown_at_once() -> None:
    held = PrefixMap()
    for number in range(1000):
        request = request_of("", [number, 1, 2])
        held.add("a", type(request)("", request.units, namespace=number % 500), float(number))
    held.add("b", request_of("", [1]), 0.0)
    held.forget("a")
    assert held.size("a") == 0
    assert held.held(type(request)("", request.units, namespace=499)) == {}
    held.add("a", request, 1000.0)  # it is back, with nothing but this
    assert held.held(request) == {"a": 3}
    assert len(list(held.tree)) > 500
    for _ in range(40):
        held.add("b", request_of("", [1]), 1001.0)
    assert len(list(held.tree)) == 2
    assert len(held.tree._roots) == 1


def test_what_is_sent_behind_a_report_of_an_eviction_stays_though_forgetting_takes_long() -> None:
    held = PrefixMap()
    for number in range(100):
        held.add("a", request_of("", [1, 2, 3, number, 4, 5]), float(number))
    held.keep_only("a", request_of("", [1, 2, 3]), 2)
    held.add("a", request_of("", [1, 2, 3, 50, 4, 5]), 200.0)
    for _ in range(10):
        held.add("b", request_of("", [7]), 300.0)
    assert held.held(request_of("", [1, 2, 3, 50, 4, 5])) == {"a": 6}
    assert held.size("a") == 6


def test_a_node_that_is_cut_while_it_waits_to_be_forgotten_is_forgotten_whole() -> None:
    held = PrefixMap()
    for number in range(200):
        held.add("a", request_of("", [1, 2, 3, number, 4, 5]), float(number))
    held.keep_only("a", request_of("", [1, 2, 3]), 2)
    for number in range(0, 200, 3):
        held.add("b", request_of("", [1, 2, 3, number, 4]), 300.0)
    assert held.size("a") == 2
