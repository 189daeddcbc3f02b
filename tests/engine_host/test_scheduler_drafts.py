"""Tokens that are known beforehand: several in a step, and those behind the last accepted one taken back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.engine.samples import forced
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.request import FinishReason, Request, TokenLimits
from hpu_duo.sampling import SamplingParams
from hpu_duo.scheduling import SchedulingPolicy, VirtualTokenCounter
from tests.engine_host.planning import LIMITS, add, planned, shares_of, stepped
from tests.engine_host.simulated_device import EOS, SimulatedDevice

DRAFTS = replace(LIMITS, max_num_batched_tokens=16, decode_len=4)


class Sevens:
    """Drafts sevens, as many as may be."""

    def propose(self, request: Request, most: int) -> Sequence[int]:
        return [7] * most

    def choose(self, found: Mapping[Request, Sized], num_rows: int, longest: int) -> int:
        return longest

    def skip(self, reason: str) -> None:
        pass


def add_forced(scheduler: Scheduler, num_prompt_tokens: int, tokens: Sequence[int]) -> Request:
    request = Request("f", [1] * num_prompt_tokens, forced(tokens), TokenLimits(64))
    scheduler.add(request)
    return request


def test_tokens_that_are_known_beforehand_are_verified_together() -> None:
    scheduler = Scheduler(DRAFTS)
    request = add_forced(scheduler, 6, range(10, 17))
    shares = []
    while scheduler.has_unfinished:
        plan = planned(scheduler)
        shares += [(*share[1:], plan.num_samples) for share in shares_of(plan)]
        done = request.num_output_tokens
        committed = scheduler.commit(plan, range(10 + done, 10 + done + plan.num_samples))
        assert [one.number for one in committed] == list(range(done, done + plan.num_samples))
        assert [one.sample for one in committed] == list(range(plan.num_samples))
    # The last token of the prompt and three drafts; what is behind the last draft is not known.
    assert shares == [(0, 5, 0), (5, 4, 4), (9, 3, 3)]
    assert request.output_token_ids.tolist() == list(range(10, 17))


def test_what_is_computed_behind_the_last_accepted_token_is_taken_back() -> None:
    scheduler = Scheduler(DRAFTS)
    request = add_forced(scheduler, 6, range(10, 17))
    scheduler.commit(planned(scheduler), [])
    plan = planned(scheduler)
    committed = scheduler.commit(plan, [10, 11, 12, 13], [2])
    assert [done.token for done in committed] == [10, 11]
    assert (request.num_computed_tokens, request.num_tokens) == (7, 8)
    assert shares_of(planned(scheduler)) == [("f", 7, 4)]


@settings(max_examples=60, deadline=None)
@given(
    num_prompt=st.integers(1, 9),
    accepted=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    block_size=st.integers(1, 6),
)
def test_snapshots_of_rows_that_decode_several_tokens_are_those_at_the_border(
    num_prompt: int, accepted: list[int], block_size: int
) -> None:
    """Tokens that were computed and taken back lie in the slack: the device looks at what is read."""
    limits = replace(
        DRAFTS, block_size=block_size, caches_prefixes=True, num_snapshots=4, num_blocks=60, step_tokens=99
    )
    scheduler = Scheduler(limits)
    device = SimulatedDevice(60, block_size, limits.num_ring_rows, uses_blocks=True, slack=3)
    request = add_forced(scheduler, num_prompt, [2 + number % 9 for number in range(30)])
    for most in accepted:
        plan = planned(scheduler)
        device.run(plan)
        done = request.num_output_tokens
        ids = [2 + number % 9 for number in range(done, done + plan.num_samples)]
        scheduler.commit(plan, ids, [min(most, plan.num_samples)] if plan.num_samples else [])
    text = request.tokens[: request.num_tokens].tolist()
    scheduler.abort("f")
    scheduler.add(Request("g", [*text, 1, 1, 1], SamplingParams(max_tokens=1), TokenLimits(64)))
    while scheduler.has_unfinished:
        plan = planned(scheduler)
        device.run(plan)
        scheduler.commit(plan, [1] * plan.num_samples)


@pytest.mark.parametrize("accepted", [[0], [5], [], [1, 1]])
def test_a_row_takes_at_least_one_token_and_no_more_than_were_sampled(accepted: list[int]) -> None:
    scheduler = Scheduler(DRAFTS)
    request = add_forced(scheduler, 6, range(10, 17))
    scheduler.commit(planned(scheduler), [])
    plan = planned(scheduler)
    with pytest.raises(ValueError, match=r"at most \[4\] accepted tokens, got"):
        scheduler.commit(plan, [10, 11, 12, 13], accepted)
    scheduler.commit(plan, [10, 11, 12, 13])
    assert request.num_output_tokens == 4


def test_tokens_behind_the_one_that_ends_a_request_are_dropped() -> None:
    scheduler = Scheduler(DRAFTS)
    params = SamplingParams(forced_token_ids=(10, EOS, 12, 13), max_tokens=9)
    request = Request("f", [1, 1], params, TokenLimits(64, frozenset([EOS])))
    scheduler.add(request)
    scheduler.commit(planned(scheduler), [10])
    committed = scheduler.commit(planned(scheduler), [EOS, 12, 13])
    assert [(done.token, done.finish_reason) for done in committed] == [(EOS, FinishReason.STOP)]
    assert not scheduler.has_unfinished


def _ended_by_the_second_of_four(policy: SchedulingPolicy | None = None, **limits: bool) -> Scheduler:
    """A scheduler with a request that ended at the second of four tokens that were accepted."""
    scheduler = Scheduler(replace(DRAFTS, **limits), policy=policy)
    params = SamplingParams(forced_token_ids=(10, EOS, 12, 13, 14, 15), max_tokens=9, user="ann")
    request = Request("f", [1], params, TokenLimits(64, frozenset([EOS])))
    scheduler.add(request)
    plan = planned(scheduler)
    assert shares_of(plan) == [("f", 0, 4)]
    scheduler.commit(plan, [10, EOS, 12, 13])
    assert not scheduler.has_unfinished
    assert (request.num_tokens, request.num_computed_tokens) == (3, 2)
    return scheduler


def test_tokens_behind_the_one_that_ends_a_request_are_not_charged_for() -> None:
    policy = VirtualTokenCounter()
    _ended_by_the_second_of_four(policy)
    assert policy.counter("ann") == 1 + 2 * 2


@pytest.mark.parametrize("uses_rows", [False, True])
def test_what_is_computed_behind_the_token_that_ends_a_request_is_not_cached(uses_rows: bool) -> None:
    """A block of it would have the keys of tokens that are nowhere in the text."""
    scheduler = _ended_by_the_second_of_four(caches_prefixes=True, uses_rows=uses_rows)
    assert scheduler.allocations.prefixes is not None
    assert not list(scheduler.allocations.prefixes.tree)


def test_drafts_take_free_blocks_only_and_give_back_what_is_rejected() -> None:
    scheduler = Scheduler(replace(DRAFTS, num_blocks=3))
    scheduler.drafting = Sevens()
    one, other = add(scheduler, "a", 2), add(scheduler, "b", 2)
    stepped(scheduler)
    plan = planned(scheduler)
    assert shares_of(plan) == [("a", 2, 4), ("b", 2, 2)]
    scheduler.commit(plan, [7] * 6, [1, 1])
    assert (one.num_blocks, other.num_blocks) == (1, 1)
    plan = planned(scheduler)
    assert shares_of(plan) == [("a", 3, 4), ("b", 3, 1)]
    scheduler.commit(plan, [7] * 5, [4, 1])
    assert (one.num_blocks, one.num_computed_tokens, other.num_blocks) == (2, 7, 1)
    # What was accepted fills two of three blocks, so the second request is preempted as without drafts.
    assert shares_of(planned(scheduler)) == [("a", 7, 2)]
    assert other.num_computed_tokens == 0


def test_drafts_leave_tokens_of_a_step_to_prompts() -> None:
    scheduler = Scheduler(replace(DRAFTS, num_blocks=40))
    scheduler.drafting = Sevens()
    add(scheduler, "a", 2)
    stepped(scheduler)
    add(scheduler, "b", 13)
    plan = planned(scheduler)
    assert shares_of(plan) == [("a", 2, 3), ("b", 0, 13)]
    scheduler.commit(plan, [7] * 4, [3, 1])
    add(scheduler, "c", 30)
    assert shares_of(planned(scheduler)) == [("a", 5, 1), ("b", 13, 1), ("c", 0, 14)]
