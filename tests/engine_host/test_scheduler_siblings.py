"""Samples of one prompt in the scheduler: they wait for their parent's prompt and fork its cache."""

from __future__ import annotations

from dataclasses import replace

from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.kv.pool import BlockCopy, RowCopy
from hpu_duo.request import Request, RequestStatus
from tests.engine_host.planning import LIMITS, add, planned, shares_of, stepped


def add_family(scheduler: Scheduler, num_prompt_tokens: int, max_tokens: int = 8) -> list[Request]:
    parent = add(scheduler, "p", num_prompt_tokens, max_tokens)
    children = [parent.sibling(name, sample_index=i, sampling_seed=i) for i, name in ((1, "c"), (2, "d"))]
    for child in children:
        scheduler.add(child)
    return [parent, *children]


def test_siblings_fork_when_the_prompt_of_their_parent_is_computed() -> None:
    scheduler = Scheduler(LIMITS)
    add_family(scheduler, 11)
    assert stepped(scheduler) == [("p", 0, 8)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    assert stepped(scheduler) == [("p", 8, 3)]
    plan = planned(scheduler)
    assert shares_of(plan) == [("p", 11, 1), ("c", 10, 1), ("d", 10, 1)]
    assert plan.moves == (BlockCopy(2, 3), RowCopy(0, 1), BlockCopy(2, 4), RowCopy(0, 2))
    assert len(plan.sampled_rows) == 3


def test_siblings_fork_from_a_parent_that_ends_with_its_first_token() -> None:
    scheduler = Scheduler(LIMITS)
    parent, *_ = add_family(scheduler, 6, max_tokens=1)
    stepped(scheduler)
    assert parent.is_finished
    plan = planned(scheduler)
    assert shares_of(plan) == [("c", 5, 1), ("d", 5, 1)]
    assert plan.moves == (BlockCopy(1, 2), RowCopy(0, 1), BlockCopy(1, 3), RowCopy(0, 2), RowCopy(2, 0))
    scheduler.commit(plan, [5, 5])
    assert scheduler.allocations.blocks.num_used == 0


def test_siblings_take_the_rows_of_requests_that_end_in_the_same_step() -> None:
    scheduler = Scheduler(replace(LIMITS, max_num_seqs=3))
    for name in ("x", "y"):
        add(scheduler, name, 1, max_tokens=1)
    add_family(scheduler, 4)
    stepped(scheduler)
    assert stepped(scheduler) == [("p", 4, 1), ("c", 3, 1), ("d", 3, 1)]


def test_siblings_without_room_become_ordinary_requests() -> None:
    scheduler = Scheduler(replace(LIMITS, max_num_seqs=2))
    _, child, other = add_family(scheduler, 4)
    stepped(scheduler)
    assert (child.status, other.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    scheduler.abort("p")
    assert stepped(scheduler) == [("c", 3, 1), ("d", 0, 4)]


def test_siblings_of_a_prompt_of_one_token_are_ordinary_requests() -> None:
    scheduler = Scheduler(LIMITS)
    add_family(scheduler, 1)
    assert stepped(scheduler) == [("p", 0, 1), ("c", 0, 1), ("d", 0, 1)]


def test_siblings_outlive_a_parent_that_is_aborted_in_flight() -> None:
    scheduler = Scheduler(LIMITS)
    _, child, _ = add_family(scheduler, 4)
    plan = planned(scheduler)
    scheduler.abort("p")
    assert child.status is RequestStatus.WAITING
    scheduler.commit(plan, [5])
    assert stepped(scheduler) == [("c", 0, 4), ("d", 0, 4)]


def test_siblings_of_a_parent_preempted_in_its_prompt_become_ordinary_requests() -> None:
    limits = replace(LIMITS, max_num_batched_tokens=2, max_num_seqs=2, num_blocks=5)
    scheduler = Scheduler(limits)
    add(scheduler, "a", 4, max_tokens=12)
    parent, child, _ = add_family(scheduler, 10)
    while parent.status is not RequestStatus.RUNNING:
        stepped(scheduler)
    while parent.status is RequestStatus.RUNNING:
        assert child.status is RequestStatus.FOLLOWING
        stepped(scheduler)
    assert 0 < scheduler.allocations.blocks.num_used <= 4
    assert child.status is RequestStatus.WAITING
    assert scheduler.num_waiting == 3


def test_siblings_do_not_fork_from_a_parent_that_is_past_its_prompt() -> None:
    scheduler = Scheduler(LIMITS)
    parent, *_ = add_family(scheduler, 4)
    parent.append(7)
    assert stepped(scheduler) == [("p", 0, 5)]
    assert stepped(scheduler) == [("p", 5, 1), ("c", 0, 4), ("d", 0, 3)]


def test_siblings_of_a_new_parent_do_not_fork_from_an_aborted_one_of_the_same_name() -> None:
    scheduler = Scheduler(LIMITS)
    add(scheduler, "p", 4)
    plan = planned(scheduler)
    scheduler.abort("p")
    _, child, _ = add_family(scheduler, 4)
    scheduler.commit(plan, [5])
    assert child.status is RequestStatus.FOLLOWING


def test_a_sibling_added_after_the_prompt_was_computed_is_an_ordinary_request() -> None:
    scheduler = Scheduler(LIMITS)
    parent = add(scheduler, "p", 4)
    stepped(scheduler)
    scheduler.add(parent.sibling("c", sample_index=1, sampling_seed=1))
    assert stepped(scheduler) == [("p", 4, 1), ("c", 0, 4)]
