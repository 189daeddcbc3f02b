"""Lines of Python that planning a step runs, with a long queue."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from graphs import StepLimits
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.scheduling import POLICIES, make_policy
from tests.engine_host.planning import planned, stepped
from tests.engine_host.simulated_device import make_request
from tests.tiers import crossed

LIMITS = StepLimits(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=128,
    block_size=4,
    num_blocks=256,
    decode_len=1,
    max_chunk_rows=2,
    caches_prefixes=True,
    uses_rows=False,
)
TEXT = [1 + place % 9 for place in range(80)]


def num_lines(work: Callable[[], object]) -> int:
    """Count the lines of Python that are run, each as often as it is."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
    return count


def _behind_one_prompt(policy: str, num_waiting: int, num_users: int) -> Scheduler:
    """A scheduler whose requests all wait for what one of them is computing."""
    scheduler = Scheduler(LIMITS, policy=make_policy(policy))
    scheduler.add(make_request("first", [*TEXT, 7], max_tokens=4, max_model_len=128, user="user0"))
    stepped(scheduler)
    for number in range(num_waiting):
        tail = [1 + number % 5, 1 + number % 7]
        request = make_request(
            f"r{number}",
            [*TEXT, *tail],
            max_tokens=1 + number % 9,
            max_model_len=128,
            user=f"user{number % num_users}",
        )
        request.score = number * 7 % 31
        scheduler.add(request)
    return scheduler


@pytest.mark.parametrize(
    ("policy", "share"),
    crossed(
        [*POLICIES, "sjf:patience=0", "lpm:patience=0", "dlpm:patience=0"],
        {"one user": 0.0, "users": 0.05, "a user each": 1.0},
    ),
)
def test_planning_takes_four_times_as_much_for_four_times_as_many_that_are_passed_over(
    policy: str, share: float
) -> None:
    few, many = 150, 600
    taken = {}
    for num in (few, many):
        scheduler = _behind_one_prompt(policy, num, max(1, int(share * num)))
        taken[num] = num_lines(scheduler.plan)
    assert taken[many] < 4.8 * taken[few], f"{taken[few]} and {taken[many]} lines"
    assert taken[many] < 400 * many


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_that_nobody_looks_at_take_nothing(policy: str) -> None:
    """All rows are taken, and no prompt is under way."""
    taken = {}
    for num in (150, 600):
        scheduler = Scheduler(replace(LIMITS, max_num_seqs=2), policy=make_policy(policy))
        for name in "ab":
            scheduler.add(make_request(name, [1, 2], max_tokens=1, priority=0))
        stepped(scheduler)
        for name in "cd":
            scheduler.add(make_request(name, [1, 2], max_tokens=20))
        stepped(scheduler)
        for number in range(num):
            request = make_request(f"r{number}", [3, 4, number % 9], max_tokens=30, user=f"u{number % 50}")
            request.score = 1.0
            scheduler.add(request)
        planned_lines = num_lines(lambda scheduler=scheduler: planned(scheduler))
        taken[num] = planned_lines
    assert taken[600] < 1.3 * taken[150] + 200, str(taken)
