from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from graphs import StepLimits
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.scoring import forced
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.kv.copies import BlockCopy, RowCopy
from hpu_duo.request import FinishReason, Request, RequestStatus, TokenLimits
from hpu_duo.sampling import SamplingParams
from tests.engine_host.simulated_device import EOS, make_request

LIMITS = StepLimits(
    max_num_seqs=4,
    max_num_batched_tokens=8,
    max_model_len=64,
    block_size=4,
    num_blocks=16,
    decode_len=1,
    max_chunk_rows=4,
)


def _plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def _shares(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(row.request.request_id, row.start, row.num_new_tokens) for row in plan.rows]


def _step(scheduler: Scheduler, token: int = 5) -> list[tuple[str, int, int]]:
    plan = _plan(scheduler)
    scheduler.commit(plan, [token] * len(plan.sampled_rows))
    return _shares(plan)


def _add(scheduler: Scheduler, name: str, num_prompt_tokens: int, max_tokens: int = 8) -> Request:
    request = make_request(name, [1] * num_prompt_tokens, max_tokens=max_tokens)
    scheduler.add(request)
    return request


def _add_family(scheduler: Scheduler, num_prompt_tokens: int, max_tokens: int = 8) -> list[Request]:
    parent = _add(scheduler, "p", num_prompt_tokens, max_tokens)
    children = [parent.sibling(name, sample_index=i, sampling_seed=i) for i, name in ((1, "c"), (2, "d"))]
    for child in children:
        scheduler.add(child)
    return [parent, *children]


def test_an_idle_scheduler_has_nothing_to_plan() -> None:
    assert Scheduler(LIMITS).plan() is None


def test_a_long_prompt_is_cut_into_chunks_and_samples_only_after_the_last() -> None:
    scheduler = Scheduler(LIMITS)
    _add(scheduler, "a", 19)
    plans = []
    for _ in range(3):
        plans.append(_plan(scheduler))
        scheduler.commit(plans[-1], [5] * len(plans[-1].sampled_rows))
    assert [_shares(plan) for plan in plans] == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 3)]]
    assert [plan.rows[0].wants_token for plan in plans] == [False, False, True]
    assert _step(scheduler) == [("a", 19, 1)]


def test_decodes_go_first_and_a_long_prompt_takes_what_they_leave() -> None:
    scheduler = Scheduler(LIMITS)
    for name in ("a", "b"):
        _add(scheduler, name, 2)
    _step(scheduler)
    _add(scheduler, "long", 12)
    assert _step(scheduler) == [("a", 2, 1), ("b", 2, 1), ("long", 0, 6)]
    assert _step(scheduler) == [("a", 3, 1), ("b", 3, 1), ("long", 6, 6)]


def test_rows_are_ordered_by_kind_and_then_by_arrival() -> None:
    scheduler = Scheduler(replace(LIMITS, max_num_batched_tokens=10))
    _add(scheduler, "long", 14)
    _step(scheduler)
    for name, length in (("two", 2), ("one", 1), ("rest", 9)):
        _add(scheduler, name, length)
    plan = _plan(scheduler)
    assert _shares(plan) == [("one", 0, 1), ("long", 10, 4), ("two", 0, 2), ("rest", 0, 3)]
    assert plan.num_tokens == 10


def test_the_head_of_the_queue_is_not_overtaken_by_a_request_that_would_fit() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=4))
    _add(scheduler, "a", 7)
    _step(scheduler)
    _add(scheduler, "big", 8)
    _add(scheduler, "small", 2)
    assert _step(scheduler) == [("a", 7, 1)]
    assert scheduler.num_waiting == 2


def test_a_request_is_admitted_only_if_running_ones_can_take_their_next_token_too() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=3))
    _add(scheduler, "a", 8, max_tokens=4)
    _add(scheduler, "b", 2, max_tokens=2)
    _step(scheduler)
    assert scheduler.leases.blocks.num_free == 1
    assert _step(scheduler) == [("a", 8, 1)]


def test_only_so_many_rows_may_have_both_context_and_several_new_tokens() -> None:
    scheduler = Scheduler(replace(LIMITS, max_chunk_rows=1))
    requests = [_add(scheduler, name, 2) for name in ("a", "b")]
    _step(scheduler)
    for request in requests:
        request.append(7)  # a forced token: two are known that are not computed
    assert _step(scheduler) == [("a", 2, 2)]
    assert _step(scheduler) == [("a", 4, 1), ("b", 2, 2)]


def test_the_latest_arrival_is_preempted_and_resumes_with_its_outputs() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=4))
    first, second = _add(scheduler, "a", 4), _add(scheduler, "b", 4)
    for _ in range(5):
        _step(scheduler)
    plan = _plan(scheduler)
    assert _shares(plan) == [("a", 8, 1)]
    assert plan.preempted == (second,)
    assert (second.status, second.num_computed_tokens, second.num_output_tokens) == (
        RequestStatus.WAITING,
        0,
        5,
    )
    scheduler.commit(plan, [5])
    while not first.is_finished:
        assert [name for name, _, _ in _step(scheduler)] == ["a"]
    resumed = _plan(scheduler)
    assert _shares(resumed) == [("b", 0, 8)]
    assert not resumed.sampled_rows
    scheduler.commit(resumed, [])
    assert _step(scheduler) == [("b", 8, 1)]
    assert second.num_output_tokens == 6


def test_a_preempted_request_comes_back_before_later_arrivals() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=4))
    first = _add(scheduler, "a", 4)
    _add(scheduler, "b", 4)
    for _ in range(5):
        _step(scheduler)
    _add(scheduler, "late", 1)
    while not first.is_finished:
        _step(scheduler)
    assert _step(scheduler)[0][0] == "b"


def test_a_chunk_that_preempts_a_scheduled_decode_takes_over_its_budget() -> None:
    limits = replace(LIMITS, max_num_batched_tokens=4, max_num_seqs=2, block_size=1, num_blocks=14)
    scheduler = Scheduler(limits)
    chunk = _add(scheduler, "chunk", 2)
    _add(scheduler, "late", 2)
    _step(scheduler)
    for _ in range(4):
        chunk.append(7)
    for _ in range(5):
        scheduler.leases.blocks.allocate(1)  # somebody else's, so that three are left
    assert scheduler.leases.blocks.num_free == 5
    scheduler.leases.blocks.allocate(2)
    plan = _plan(scheduler)
    assert _shares(plan) == [("chunk", 2, 4)]
    assert [request.request_id for request in plan.preempted] == ["late"]


def test_rows_stay_dense_when_requests_end() -> None:
    scheduler = Scheduler(LIMITS)
    for name in ("a", "b", "c"):
        _add(scheduler, name, 2)
    _step(scheduler)
    scheduler.abort("a")
    plan = _plan(scheduler)
    assert plan.moves == (RowCopy(2, 0),)
    assert [(row.request.request_id, row.ring_row) for row in plan.rows] == [("b", 1), ("c", 0)]


def test_a_new_request_fills_a_hole_without_a_copy() -> None:
    scheduler = Scheduler(LIMITS)
    for name in ("a", "b"):
        _add(scheduler, name, 2)
    _step(scheduler)
    scheduler.abort("a")
    _add(scheduler, "c", 2)
    plan = _plan(scheduler)
    assert plan.moves == ()
    assert [(row.request.request_id, row.ring_row) for row in plan.rows] == [("b", 1), ("c", 0)]


def test_commit_returns_tokens_in_row_order_and_why_requests_ended() -> None:
    scheduler = Scheduler(LIMITS)
    a, b, c = _add(scheduler, "a", 2), _add(scheduler, "b", 2, max_tokens=1), _add(scheduler, "c", 2)
    committed = scheduler.commit(_plan(scheduler), np.array([5, 6, EOS], dtype=np.int32))
    found = [(done.request, done.token, done.finish_reason) for done in committed]
    assert found == [(a, 5, None), (b, 6, FinishReason.LENGTH), (c, EOS, FinishReason.STOP)]
    assert all(type(done.token) is int for done in committed)
    assert (scheduler.num_running, scheduler.get("b"), scheduler.get("a")) == (1, None, a)


def test_the_token_of_a_request_aborted_in_flight_is_dropped() -> None:
    scheduler = Scheduler(LIMITS)
    a, b = _add(scheduler, "a", 2), _add(scheduler, "b", 2)
    plan = _plan(scheduler)
    assert scheduler.abort("a") is a
    assert [done[:3] for done in scheduler.commit(plan, [5, 6])] == [(b, 6, None)]
    assert (a.finish_reason, a.num_output_tokens) == (FinishReason.ABORT, 0)


def test_an_id_can_be_used_again_while_the_step_of_the_aborted_request_is_in_flight() -> None:
    scheduler = Scheduler(LIMITS)
    _add(scheduler, "a", 2)
    plan = _plan(scheduler)
    scheduler.abort("a")
    again = _add(scheduler, "a", 3)
    assert scheduler.commit(plan, [5]) == []
    assert again.num_output_tokens == 0
    assert _step(scheduler) == [("a", 0, 3)]


def test_aborting_an_unknown_request_says_so_by_none() -> None:
    assert Scheduler(LIMITS).abort("nobody") is None


def test_a_finished_request_cannot_be_finished_again() -> None:
    scheduler = Scheduler(LIMITS)
    a = _add(scheduler, "a", 2)
    scheduler.finish(a, FinishReason.STOP)
    assert not scheduler.has_unfinished
    with pytest.raises(ValueError, match="not an unfinished request"):
        scheduler.finish(a, FinishReason.STOP)


def test_siblings_fork_when_the_prompt_of_their_parent_is_computed() -> None:
    scheduler = Scheduler(LIMITS)
    _add_family(scheduler, 11)
    assert _step(scheduler) == [("p", 0, 8)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    assert _step(scheduler) == [("p", 8, 3)]
    plan = _plan(scheduler)
    assert _shares(plan) == [("p", 11, 1), ("c", 10, 1), ("d", 10, 1)]
    assert plan.moves == (BlockCopy(2, 3), RowCopy(0, 1), BlockCopy(2, 4), RowCopy(0, 2))
    assert len(plan.sampled_rows) == 3


def test_siblings_fork_from_a_parent_that_ends_with_its_first_token() -> None:
    scheduler = Scheduler(LIMITS)
    parent, *_ = _add_family(scheduler, 6, max_tokens=1)
    _step(scheduler)
    assert parent.is_finished
    plan = _plan(scheduler)
    assert _shares(plan) == [("c", 5, 1), ("d", 5, 1)]
    assert plan.moves == (BlockCopy(1, 2), RowCopy(0, 1), BlockCopy(1, 3), RowCopy(0, 2), RowCopy(2, 0))
    scheduler.commit(plan, [5, 5])
    assert scheduler.leases.blocks.num_used == 0


def test_siblings_take_the_rows_of_requests_that_end_in_the_same_step() -> None:
    scheduler = Scheduler(replace(LIMITS, max_num_seqs=3))
    for name in ("x", "y"):
        _add(scheduler, name, 1, max_tokens=1)
    _add_family(scheduler, 4)
    _step(scheduler)
    assert _step(scheduler) == [("p", 4, 1), ("c", 3, 1), ("d", 3, 1)]


def test_siblings_without_room_become_ordinary_requests() -> None:
    scheduler = Scheduler(replace(LIMITS, max_num_seqs=2))
    _, child, other = _add_family(scheduler, 4)
    _step(scheduler)
    assert (child.status, other.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    scheduler.abort("p")
    assert _step(scheduler) == [("c", 3, 1), ("d", 0, 4)]


def test_siblings_of_a_prompt_of_one_token_are_ordinary_requests() -> None:
    scheduler = Scheduler(LIMITS)
    _add_family(scheduler, 1)
    assert _step(scheduler) == [("p", 0, 1), ("c", 0, 1), ("d", 0, 1)]


def test_siblings_outlive_a_parent_that_is_aborted_in_flight() -> None:
    scheduler = Scheduler(LIMITS)
    _, child, _ = _add_family(scheduler, 4)
    plan = _plan(scheduler)
    scheduler.abort("p")
    assert child.status is RequestStatus.WAITING
    scheduler.commit(plan, [5])
    assert _step(scheduler) == [("c", 0, 4), ("d", 0, 4)]


def test_siblings_of_a_parent_preempted_in_its_prompt_become_ordinary_requests() -> None:
    limits = replace(LIMITS, max_num_batched_tokens=2, max_num_seqs=2, num_blocks=5)
    scheduler = Scheduler(limits)
    _add(scheduler, "a", 4, max_tokens=12)
    parent, child, _ = _add_family(scheduler, 10)
    while parent.status is not RequestStatus.RUNNING:
        _step(scheduler)
    while parent.status is RequestStatus.RUNNING:
        assert child.status is RequestStatus.FOLLOWING
        _step(scheduler)
    assert 0 < scheduler.leases.blocks.num_used <= 4
    assert child.status is RequestStatus.WAITING
    assert scheduler.num_waiting == 3


def test_siblings_do_not_fork_from_a_parent_that_is_past_its_prompt() -> None:
    scheduler = Scheduler(LIMITS)
    parent, *_ = _add_family(scheduler, 4)
    parent.append(7)
    assert _step(scheduler) == [("p", 0, 5)]
    assert _step(scheduler) == [("p", 5, 1), ("c", 0, 4), ("d", 0, 3)]


def test_siblings_of_a_new_parent_do_not_fork_from_an_aborted_one_of_the_same_name() -> None:
    scheduler = Scheduler(LIMITS)
    _add(scheduler, "p", 4)
    plan = _plan(scheduler)
    scheduler.abort("p")
    _, child, _ = _add_family(scheduler, 4)
    scheduler.commit(plan, [5])
    assert child.status is RequestStatus.FOLLOWING


def test_a_sibling_added_after_the_prompt_was_computed_is_an_ordinary_request() -> None:
    scheduler = Scheduler(LIMITS)
    parent = _add(scheduler, "p", 4)
    _step(scheduler)
    scheduler.add(parent.sibling("c", sample_index=1, sampling_seed=1))
    assert _step(scheduler) == [("p", 4, 1), ("c", 0, 4)]


def test_a_model_without_retrieval_heads_runs_without_blocks() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=0, uses_blocks=False))
    request = _add(scheduler, "a", 30)
    for _ in range(4):
        _step(scheduler)
    assert (request.num_computed_tokens, request.num_blocks) == (30, 0)


def test_a_request_that_fills_the_pool_to_the_last_slot_finishes_alone() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=2))
    request = _add(scheduler, "a", 1, max_tokens=8)
    while scheduler.has_unfinished:
        _step(scheduler)
    assert request.num_output_tokens == 8


def test_a_request_larger_than_the_pool_is_refused_and_leaves_no_trace() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=2))
    with pytest.raises(ValueError, match="up to 9 tokens, which need 3 blocks of 4, got 2 blocks"):
        _add(scheduler, "a", 2, max_tokens=8)
    assert (scheduler.has_unfinished, scheduler.get("a"), scheduler.plan()) == (False, None, None)


def test_an_id_in_use_is_refused() -> None:
    scheduler = Scheduler(LIMITS)
    request = _add(scheduler, "a", 2)
    with pytest.raises(ValueError, match="'a' is in use"):
        _add(scheduler, "a", 3)
    scheduler.abort("a")
    with pytest.raises(ValueError, match="has been added before"):
        scheduler.add(request)
    assert not scheduler.has_unfinished


def test_steps_are_planned_and_committed_in_turn() -> None:
    scheduler = Scheduler(LIMITS)
    _add(scheduler, "a", 2)
    plan = _plan(scheduler)
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


DRAFTS = replace(LIMITS, max_num_batched_tokens=16, decode_len=4)


def _add_forced(scheduler: Scheduler, num_prompt_tokens: int, tokens: Sequence[int]) -> Request:
    request = Request("f", [1] * num_prompt_tokens, forced(tokens), TokenLimits(64))
    scheduler.add(request)
    return request


def test_tokens_that_are_known_beforehand_are_verified_together() -> None:
    scheduler = Scheduler(DRAFTS)
    request = _add_forced(scheduler, 6, range(10, 17))
    shares = []
    while scheduler.has_unfinished:
        plan = _plan(scheduler)
        shares += [(*share[1:], plan.num_samples) for share in _shares(plan)]
        done = request.num_output_tokens
        committed = scheduler.commit(plan, range(10 + done, 10 + done + plan.num_samples))
        assert [one.number for one in committed] == list(range(done, done + plan.num_samples))
        assert [one.sample for one in committed] == list(range(plan.num_samples))
    # The last token of the prompt and three drafts; what is behind the last draft is not known.
    assert shares == [(0, 5, 0), (5, 4, 4), (9, 3, 3)]
    assert request.output_token_ids.tolist() == list(range(10, 17))


def test_what_is_computed_behind_the_last_accepted_token_is_taken_back() -> None:
    scheduler = Scheduler(DRAFTS)
    request = _add_forced(scheduler, 6, range(10, 17))
    scheduler.commit(_plan(scheduler), [])
    plan = _plan(scheduler)
    committed = scheduler.commit(plan, [10, 11, 12, 13], [2])
    assert [done.token for done in committed] == [10, 11]
    assert (request.num_computed_tokens, request.num_tokens) == (7, 8)
    assert _shares(_plan(scheduler)) == [("f", 7, 4)]


@pytest.mark.parametrize("accepted", [[0], [5], [], [1, 1]])
def test_a_row_takes_at_least_one_token_and_no_more_than_were_sampled(accepted: list[int]) -> None:
    scheduler = Scheduler(DRAFTS)
    request = _add_forced(scheduler, 6, range(10, 17))
    scheduler.commit(_plan(scheduler), [])
    plan = _plan(scheduler)
    with pytest.raises(ValueError, match=r"at most \[4\] accepted tokens, got"):
        scheduler.commit(plan, [10, 11, 12, 13], accepted)
    scheduler.commit(plan, [10, 11, 12, 13])
    assert request.num_output_tokens == 4


def test_tokens_behind_the_one_that_ends_a_request_are_dropped() -> None:
    scheduler = Scheduler(DRAFTS)
    params = SamplingParams(forced_token_ids=(10, EOS, 12, 13), max_tokens=9)
    request = Request("f", [1, 1], params, TokenLimits(64, frozenset([EOS])))
    scheduler.add(request)
    scheduler.commit(_plan(scheduler), [10])
    committed = scheduler.commit(_plan(scheduler), [EOS, 12, 13])
    assert [(done.token, done.finish_reason) for done in committed] == [(EOS, FinishReason.STOP)]
    assert not scheduler.has_unfinished
