"""Choices of policies while requests are passed over, admitted and preempted, against all on offer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpu_duo.request import Request, RequestStatus
from hpu_duo.scheduling import (
    DeficitLongestPrefixMatch,
    SchedulingPolicy,
    ShortestJobFirst,
    ShortestRemainingFirst,
    VirtualTokenCounter,
    Waiting,
    make_policy,
)
from tests.engine_host.simulated_device import make_request

Drawn = tuple[str, int, int]
"""User, length and number of cached blocks of a request."""

REQUESTS = st.lists(
    st.tuples(st.sampled_from(["ann", "bob", "cid"]), st.integers(1, 9), st.integers(0, 3)),
    min_size=1,
    max_size=14,
)
OPERATIONS = st.lists(
    st.sampled_from(["pass", "pass", "pass", "admit", "preempt", "step", "come"]), max_size=40
)


@dataclass(frozen=True)
class Found:
    """Cached blocks of a request."""

    num_usable: int

    @property
    def path(self) -> tuple[int, ...]:
        return tuple(range(self.num_usable))


class Queue:
    """Requests that a policy chooses among, without a scheduler.

    Attributes:
        offered: those that may be chosen.
    """

    def __init__(self, policy: SchedulingPolicy, drawn: list[Drawn]) -> None:
        self.policy, self._drawn = policy, drawn
        self.cached: dict[Request, int] = {}
        self.waiting = Waiting(policy, lambda request: Found(self.cached[request]))
        self.offered: set[Request] = set()
        self._all: set[Request] = set()
        self._admitted: list[Request] = []

    def come(self) -> None:
        if self._drawn:
            user, length, num_cached = self._drawn.pop()
            request = make_request(f"r{len(self.cached)}", [1] * 3, max_tokens=length, user=user)
            request.arrival = len(self.cached)
            self.cached[request] = num_cached
            self._enter(request)

    def step(self) -> None:
        """Begin a step; requests that come do so before."""
        while self._drawn and len(self._all) < 5:
            self.come()
        self._admitted.clear()
        self.waiting.begin_step()
        self.offered = set(self._all)

    def pass_over(self, request: Request) -> None:
        self.waiting.pass_over(request)
        self.offered.remove(request)

    def admit(self, request: Request) -> None:
        self.waiting.admit(request)
        request.status = RequestStatus.RUNNING
        self.policy.admitted(request)
        self.offered.remove(request)
        self._all.remove(request)
        self._admitted.append(request)

    def preempt(self) -> None:
        """Queue the last request again that was admitted in this step."""
        if self._admitted:
            self._enter(self._admitted.pop())

    def _enter(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self._all.add(request)
        self.offered.add(request)
        self.waiting.add(request)

    def num_cached(self, request: Request) -> tuple[int, int]:
        return -self.cached[request], request.arrival


def expected(queue: Queue) -> set[Request]:
    """The requests that the policy may choose, found by looking at all of them; asked behind the choice."""
    policy, offered = queue.policy, queue.offered
    earliest = min(offered, key=lambda each: each.arrival)
    is_late = queue.waiting.num_overtakes >= getattr(policy, "_patience", float("inf"))
    match policy:
        case ShortestJobFirst() if not is_late:
            return {min(offered, key=lambda each: (each.params.max_tokens, each.arrival))}
        case VirtualTokenCounter():
            least = min(policy.counter(each.params.user) for each in offered)
            of_user = {}
            for each in sorted(offered, key=lambda each: each.arrival):
                of_user.setdefault(each.params.user, each)
            return {each for user, each in of_user.items() if policy.counter(user) == least}
        case DeficitLongestPrefixMatch():
            return {min((r for r in offered if policy.credit(r.params.user) > 0), key=queue.num_cached)}
        case _ if policy.name.startswith("lpm") and not is_late:
            return {min(offered, key=queue.num_cached)}
        case _:
            return {earliest}


@pytest.mark.parametrize(
    "name",
    [
        *("fcfs", "sjf", "sjf:patience=1", "lpm:patience=inf", "lpm:patience=1", "vtc"),
        *("dlpm:patience=inf,quantum=2", "dlpm:patience=inf,quantum=9", "dlpm:patience=inf,quantum=inf"),
    ],
)
@settings(max_examples=40, deadline=None)
@given(drawn=REQUESTS, operations=OPERATIONS)
@example(drawn=[("ann", 1, 0)] * 4, operations=["pass", "admit", "step", "admit", "pass", "preempt"])
def test_a_policy_chooses_among_those_that_are_offered_as_if_the_others_were_not_there(
    name: str, drawn: list[Drawn], operations: list[str]
) -> None:
    policy = make_policy(name)
    queue = Queue(policy, list(drawn))
    queue.step()
    for operation in operations:
        if operation == "preempt":
            queue.preempt()
        elif operation == "step" or not queue.offered:
            queue.step()
        elif operation == "come" and not name.startswith("lpm"):  # its order is that of the step
            queue.come()
        if not queue.offered:
            continue
        chosen = queue.waiting.next()
        assert chosen in expected(queue)
        if operation == "pass":
            queue.pass_over(chosen)
        elif operation == "admit":
            queue.admit(chosen)


def test_only_the_request_that_was_overtaken_is_safe_from_being_displaced() -> None:
    """While the earliest one is passed over, another one goes by arrival, and may be displaced later."""
    policy = ShortestRemainingFirst(patience=1)
    queue = Queue(policy, [("ann", 2, 0), ("ann", 8, 0), ("ann", 3, 0), ("ann", 9, 0)])
    queue.step()
    first, short, long, last = sorted(queue.offered, key=lambda each: each.arrival)
    assert queue.waiting.next() is last
    queue.admit(last)
    queue.pass_over(first)
    assert queue.waiting.next() is short
    queue.admit(short)
    assert queue.waiting.next() is long
    queue.admit(long)
    queue.step()
    assert queue.waiting.next() is first
    queue.admit(first)
    newcomer = make_request("new", [1] * 3, max_tokens=1)
    newcomer.arrival = 9
    assert policy.displaced(newcomer, [first, short, long]) is long
    assert policy.displaced(newcomer, [first, short]) is short
    assert policy.displaced(newcomer, [first]) is None


def test_a_user_whose_other_requests_were_passed_over_is_chosen_again_for_one_that_comes_back() -> None:
    queue = Queue(make_policy("vtc"), [("cid", 5, 0)] * 3 + [("ann", 5, 0)] * 2)
    queue.step()
    of_ann = [queue.waiting.next()]
    queue.admit(of_ann[0])
    queue.admit(queue.waiting.next())
    of_ann.append(queue.waiting.next())
    queue.pass_over(of_ann[1])
    queue.admit(queue.waiting.next())
    assert {each.params.user for each in queue.offered} == {"cid"}
    for _ in range(3):
        queue.preempt()
    assert queue.waiting.next() is of_ann[0]
    assert {each.params.user for each in of_ann} == {"ann"}
