from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.kv.pool import RowCopy
from hpu_duo.request import FinishReason, RequestStatus
from tests.engine_host.planning import LIMITS, add, planned, shares_of, stepped
from tests.engine_host.simulated_device import EOS


def test_an_idle_scheduler_has_nothing_to_plan() -> None:
    assert Scheduler(LIMITS).plan() is None


def test_a_long_prompt_is_cut_into_chunks_and_samples_only_after_the_last() -> None:
    scheduler = Scheduler(LIMITS)
    add(scheduler, "a", 19)
    plans = []
    for _ in range(3):
        plans.append(planned(scheduler))
        scheduler.commit(plans[-1], [5] * len(plans[-1].sampled_rows))
    assert [shares_of(plan) for plan in plans] == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 3)]]
    assert [plan.rows[0].wants_token for plan in plans] == [False, False, True]
    assert stepped(scheduler) == [("a", 19, 1)]


def test_decodes_go_first_and_a_long_prompt_takes_what_they_leave() -> None:
    scheduler = Scheduler(LIMITS)
    for name in ("a", "b"):
        add(scheduler, name, 2)
    stepped(scheduler)
    add(scheduler, "long", 12)
    assert stepped(scheduler) == [("a", 2, 1), ("b", 2, 1), ("long", 0, 6)]
    assert stepped(scheduler) == [("a", 3, 1), ("b", 3, 1), ("long", 6, 6)]


def test_rows_are_ordered_by_kind_and_then_by_arrival() -> None:
    scheduler = Scheduler(replace(LIMITS, max_num_batched_tokens=10))
    add(scheduler, "long", 14)
    stepped(scheduler)
    for name, length in (("two", 2), ("one", 1), ("rest", 9)):
        add(scheduler, name, length)
    plan = planned(scheduler)
    assert shares_of(plan) == [("one", 0, 1), ("long", 10, 4), ("two", 0, 2), ("rest", 0, 3)]
    assert plan.num_tokens == 10


def test_the_head_of_the_queue_is_not_overtaken_by_a_request_that_would_fit() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=4))
    add(scheduler, "a", 7)
    stepped(scheduler)
    add(scheduler, "big", 8)
    add(scheduler, "small", 2)
    assert stepped(scheduler) == [("a", 7, 1)]
    assert scheduler.num_waiting == 2


def test_a_request_is_admitted_only_if_running_ones_can_take_their_next_token_too() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=3))
    add(scheduler, "a", 8, max_tokens=4)
    add(scheduler, "b", 2, max_tokens=2)
    stepped(scheduler)
    assert scheduler.allocations.blocks.num_free == 1
    assert stepped(scheduler) == [("a", 8, 1)]


def test_only_so_many_rows_may_have_both_context_and_several_new_tokens() -> None:
    scheduler = Scheduler(replace(LIMITS, max_chunk_rows=1))
    requests = [add(scheduler, name, 2) for name in ("a", "b")]
    stepped(scheduler)
    for request in requests:
        request.append(7)  # a forced token: two are known that are not computed
    assert stepped(scheduler) == [("a", 2, 2)]
    assert stepped(scheduler) == [("a", 4, 1), ("b", 2, 2)]


def test_the_latest_arrival_is_preempted_and_resumes_with_its_outputs() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=4))
    first, second = add(scheduler, "a", 4), add(scheduler, "b", 4)
    for _ in range(5):
        stepped(scheduler)
    plan = planned(scheduler)
    assert shares_of(plan) == [("a", 8, 1)]
    assert plan.preempted == (second,)
    assert (second.status, second.num_computed_tokens, second.num_output_tokens) == (
        RequestStatus.WAITING,
        0,
        5,
    )
    scheduler.commit(plan, [5])
    while not first.is_finished:
        assert [name for name, _, _ in stepped(scheduler)] == ["a"]
    resumed = planned(scheduler)
    assert shares_of(resumed) == [("b", 0, 8)]
    assert not resumed.sampled_rows
    scheduler.commit(resumed, [])
    assert stepped(scheduler) == [("b", 8, 1)]
    assert second.num_output_tokens == 6


def test_a_preempted_request_comes_back_before_later_arrivals() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=4))
    first = add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    for _ in range(5):
        stepped(scheduler)
    add(scheduler, "late", 1)
    while not first.is_finished:
        stepped(scheduler)
    assert stepped(scheduler)[0][0] == "b"


def test_a_chunk_that_preempts_a_scheduled_decode_takes_over_its_budget() -> None:
    limits = replace(LIMITS, max_num_batched_tokens=4, max_num_seqs=2, block_size=1, num_blocks=14)
    scheduler = Scheduler(limits)
    chunk = add(scheduler, "chunk", 2)
    add(scheduler, "late", 2)
    stepped(scheduler)
    for _ in range(4):
        chunk.append(7)
    for _ in range(5):
        scheduler.allocations.blocks.allocate(1)  # somebody else's, so that three are left
    assert scheduler.allocations.blocks.num_free == 5
    scheduler.allocations.blocks.allocate(2)
    plan = planned(scheduler)
    assert shares_of(plan) == [("chunk", 2, 4)]
    assert [request.request_id for request in plan.preempted] == ["late"]


def test_rows_stay_dense_when_requests_end() -> None:
    scheduler = Scheduler(LIMITS)
    for name in ("a", "b", "c"):
        add(scheduler, name, 2)
    stepped(scheduler)
    scheduler.abort("a")
    plan = planned(scheduler)
    assert plan.moves == (RowCopy(2, 0),)
    assert [(row.request.request_id, row.ring_row) for row in plan.rows] == [("b", 1), ("c", 0)]


def test_a_new_request_fills_a_hole_without_a_copy() -> None:
    scheduler = Scheduler(LIMITS)
    for name in ("a", "b"):
        add(scheduler, name, 2)
    stepped(scheduler)
    scheduler.abort("a")
    add(scheduler, "c", 2)
    plan = planned(scheduler)
    assert plan.moves == ()
    assert [(row.request.request_id, row.ring_row) for row in plan.rows] == [("b", 1), ("c", 0)]


def test_commit_returns_tokens_in_row_order_and_why_requests_ended() -> None:
    scheduler = Scheduler(LIMITS)
    a, b, c = add(scheduler, "a", 2), add(scheduler, "b", 2, max_tokens=1), add(scheduler, "c", 2)
    committed = scheduler.commit(planned(scheduler), np.array([5, 6, EOS], dtype=np.int32))
    found = [(done.request, done.token, done.finish_reason) for done in committed]
    assert found == [(a, 5, None), (b, 6, FinishReason.LENGTH), (c, EOS, FinishReason.STOP)]
    assert all(type(done.token) is int for done in committed)
    assert (scheduler.num_running, scheduler.get("b"), scheduler.get("a")) == (1, None, a)


def test_the_token_of_a_request_aborted_in_flight_is_dropped() -> None:
    scheduler = Scheduler(LIMITS)
    a, b = add(scheduler, "a", 2), add(scheduler, "b", 2)
    plan = planned(scheduler)
    assert scheduler.abort("a") is a
    assert [done[:3] for done in scheduler.commit(plan, [5, 6])] == [(b, 6, None)]
    assert (a.finish_reason, a.num_output_tokens) == (FinishReason.ABORT, 0)


def test_an_id_can_be_used_again_while_the_step_of_the_aborted_request_is_in_flight() -> None:
    scheduler = Scheduler(LIMITS)
    add(scheduler, "a", 2)
    plan = planned(scheduler)
    scheduler.abort("a")
    again = add(scheduler, "a", 3)
    assert scheduler.commit(plan, [5]) == []
    assert again.num_output_tokens == 0
    assert stepped(scheduler) == [("a", 0, 3)]


def test_aborting_an_unknown_request_says_so_by_none() -> None:
    assert Scheduler(LIMITS).abort("nobody") is None


def test_a_finished_request_cannot_be_finished_again() -> None:
    scheduler = Scheduler(LIMITS)
    a = add(scheduler, "a", 2)
    scheduler.finish(a, FinishReason.STOP)
    assert not scheduler.has_unfinished
    with pytest.raises(ValueError, match="not an unfinished request"):
        scheduler.finish(a, FinishReason.STOP)


def test_a_model_without_retrieval_heads_runs_without_blocks() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=0, uses_blocks=False))
    request = add(scheduler, "a", 30)
    for _ in range(4):
        stepped(scheduler)
    assert (request.num_computed_tokens, request.num_blocks) == (30, 0)


def test_a_request_that_fills_the_pool_to_the_last_slot_finishes_alone() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=2))
    request = add(scheduler, "a", 1, max_tokens=8)
    while scheduler.has_unfinished:
        stepped(scheduler)
    assert request.num_output_tokens == 8


def test_a_request_larger_than_the_pool_is_refused_and_leaves_no_trace() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=2))
    with pytest.raises(ValueError, match="up to 9 tokens, which need 3 blocks of 4, got 2 blocks"):
        add(scheduler, "a", 2, max_tokens=8)
    assert (scheduler.has_unfinished, scheduler.get("a"), scheduler.plan()) == (False, None, None)


def test_an_id_in_use_is_refused() -> None:
    scheduler = Scheduler(LIMITS)
    request = add(scheduler, "a", 2)
    with pytest.raises(ValueError, match="'a' is in use"):
        add(scheduler, "a", 3)
    scheduler.abort("a")
    with pytest.raises(ValueError, match="has been added before"):
        scheduler.add(request)
    assert not scheduler.has_unfinished


def test_steps_are_planned_and_committed_in_turn() -> None:
    scheduler = Scheduler(LIMITS)
    add(scheduler, "a", 2)
    plan = planned(scheduler)
    with pytest.raises(ValueError, match="must be committed"):
        scheduler.plan()
    with pytest.raises(ValueError, match="expected 1 sampled tokens, got 2"):
        scheduler.commit(plan, [5, 6])
    scheduler.commit(plan, [5])
    with pytest.raises(ValueError, match="only once"):
        scheduler.commit(plan, [5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens of at least max_num_seqs=4, got 3"),
        ({"max_num_seqs": 0}, "expected max_num_seqs >= 1, got 0"),
        ({"max_chunk_rows": 0}, "expected max_chunk_rows >= 1, got 0"),
        ({"num_blocks": 0}, "expected num_blocks >= 1 with uses_blocks=True, got 0"),
    ],
)
def test_limits_under_which_nothing_could_run_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LIMITS, **change)  # type: ignore[arg-type]
