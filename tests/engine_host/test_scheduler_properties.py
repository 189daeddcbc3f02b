"""Random traffic under first come first served, and under a policy that prefers long requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings

from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.request import Request
from hpu_duo.scheduling import FirstComeFirstServed, SchedulingPolicy, Waiting
from tests.engine_host.planning import LIMITS, add, stepped
from tests.engine_host.scheduler_machine import SchedulerMachine


def length(request: Request) -> tuple[int, int]:
    return len(request.tokens), request.arrival


class LongestFirst(SchedulingPolicy):
    """Admits the longest request, preempts the shortest one, and keeps accounts."""

    def __init__(self) -> None:
        self.computed: Counter[Request] = Counter()
        self.sampled: Counter[Request] = Counter()

    def next(self, waiting: Waiting) -> Request:
        return max(waiting, key=length)

    def victim(self, running: Sequence[Request]) -> Request:
        return min(running, key=length)

    def charge(self, request: Request, num_computed: int, num_sampled: int) -> None:
        self.computed[request] += num_computed
        self.sampled[request] += num_sampled


class LongestFirstMachine(SchedulerMachine):
    """Every request ends here, too, and is charged for what it got; the order is another one."""

    # An earlier arrival that is admitted late takes the place of the one that is never preempted.
    most_wasted = 4

    def make_policy(self) -> SchedulingPolicy:
        self.policy = LongestFirst()
        return self.policy

    def _check_preemptions(
        self, kept: list[Request], preempted: Sequence[Request], running: list[Request]
    ) -> None:
        assert list(map(length, preempted)) == sorted(map(length, preempted))
        assert all(length(p) < length(k) for p in preempted for k in kept if k is not running[0])

    def _check_order(self, admitted: list[Request], waiting: list[Request]) -> None:
        ordinary = [a for a in admitted if a.parent is None]
        assert all(length(a) > length(w) for a in ordinary for w in waiting)

    def _next_of(self, waiting: list[Request]) -> Request:
        return max(waiting, key=length)

    def _commit(self, plan: StepPlan, tokens: list[int]) -> None:
        expected = Counter(self.policy.computed)
        for row in plan.rows:
            if row.request.request_id in self.unfinished:
                expected[row.request] += row.num_new_tokens
        super()._commit(plan, tokens)
        assert self.policy.computed == expected
        for request in expected:
            assert self.policy.sampled[request] == request.num_output_tokens


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLongestFirstMachine = LongestFirstMachine.TestCase
TestLongestFirstMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("policy", "first"), [(None, ["a", "b"]), (LongestFirst(), ["c", "b"])])
def test_the_policy_says_who_is_admitted(policy: SchedulingPolicy | None, first: list[str]) -> None:
    scheduler = Scheduler(replace(LIMITS, max_num_seqs=2), policy=policy)
    for name, num_tokens in (("a", 2), ("b", 3), ("c", 4)):
        add(scheduler, name, num_tokens)
    assert sorted(name for name, _, _ in stepped(scheduler)) == sorted(first)


def test_the_policy_says_who_is_preempted_and_the_earliest_goes_on() -> None:
    """Three requests fill the pool; the shortest is not the latest, and the earliest is shorter than both."""
    limits = replace(LIMITS, num_blocks=6, max_num_batched_tokens=32)
    preempted = {}
    for name, policy in (("fcfs", FirstComeFirstServed()), ("longest", LongestFirst())):
        scheduler = Scheduler(limits, policy=policy)
        for each, num_tokens, max_tokens in (("a", 7, 4), ("b", 7, 6), ("c", 7, 12)):
            add(scheduler, each, num_tokens, max_tokens)
        plans = [scheduler.plan()]
        while plans[-1] is not None and not plans[-1].preempted:
            scheduler.commit(plans[-1], [5] * len(plans[-1].sampled_rows))
            plans.append(scheduler.plan())
        assert plans[-1] is not None
        preempted[name] = [request.request_id for request in plans[-1].preempted]
        assert "a" in [row.request.request_id for row in plans[-1].rows]
    assert preempted == {"fcfs": ["c"], "longest": ["b"]}
