"""Priorities: served in their order, and refused where nobody looks at them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings

from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.request import Request
from hpu_duo.sampling import FieldError, SamplingParams
from hpu_duo.scheduling import PriorityFirst, SchedulingPolicy, make_policy
from tests.engine_host.planning import LIMITS, stepped
from tests.engine_host.simulated_device import make_request
from tests.scheduling.ranked_machine import Place, RankedMachine

ONE_AT_A_TIME = replace(LIMITS, max_num_seqs=1)


class PriorityMachine(RankedMachine):
    def make_policy(self) -> SchedulingPolicy:
        return PriorityFirst()

    def place(self, request: Request) -> Place:
        return (request.params.priority,)


TestPriorityMachine = PriorityMachine.TestCase
TestPriorityMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_lower_values_come_first_and_equal_ones_in_order_of_arrival() -> None:
    scheduler = Scheduler(ONE_AT_A_TIME, policy=PriorityFirst())
    for name, priority in (("a", 0), ("b", 5), ("c", -3), ("d", 0), ("e", -3)):
        scheduler.add(make_request(name, [1], max_tokens=1, priority=priority))
    assert [stepped(scheduler)[0][0] for _ in range(5)] == ["c", "e", "a", "d", "b"]


def test_a_running_request_is_not_displaced_by_a_more_urgent_one() -> None:
    scheduler = Scheduler(ONE_AT_A_TIME, policy=PriorityFirst())
    scheduler.add(make_request("calm", [1], max_tokens=3))
    assert stepped(scheduler)[0][0] == "calm"
    scheduler.add(make_request("urgent", [1], max_tokens=1, priority=-9))
    assert [stepped(scheduler)[0][0] for _ in range(3)] == ["calm", "calm", "urgent"]


@pytest.mark.parametrize(("patience", "served_at"), [(2, 2), (5, 5), (0, 0)])
def test_with_patience_nobody_is_overtaken_more_often_than_that(patience: int, served_at: int) -> None:
    scheduler = Scheduler(ONE_AT_A_TIME, policy=make_policy(f"priority:patience={patience}"))
    scheduler.add(make_request("calm", [1], max_tokens=1, priority=9))
    order = []
    for number in range(8):
        scheduler.add(make_request(f"urgent{number}", [1], max_tokens=1))
        order.append(stepped(scheduler)[0][0])
    assert order.index("calm") == served_at


def test_a_priority_is_refused_where_the_policy_does_not_look_at_it() -> None:
    scheduler = Scheduler(LIMITS)
    with pytest.raises(FieldError, match=r"priority: expected 0, got 1: .*scheduling_policy='priority' does"):
        scheduler.add(make_request(priority=1))
    assert not scheduler.has_unfinished
    scheduler.add(make_request(priority=0))


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", 1.5), ("priority", True), ("user", 5), ("expected_tokens", -1), ("expected_tokens", "x")],
)
def test_fields_of_scheduling_are_checked(field: str, value: object) -> None:
    with pytest.raises(FieldError, match=f"^{field}: expected"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
