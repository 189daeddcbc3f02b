"""Prompts that are trimmed to a bucket, and prompts that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphs import BatchShape, BucketTable, Phase, StepLimits
from hpu_duo.engine.batch import exact_shape
from hpu_duo.engine.scheduler import ChunkTrimming, Scheduler
from hpu_duo.engine.step_plan import ScheduledRow, StepPlan
from tests.engine_host.simulated_device import SimulatedDevice, make_request, outputs_alone

WHOLE = Phase(causal=True, shared=True, unique=True)


def scheduler(*query_lens: int, step: float = 0.0, longest: int = 64) -> Scheduler:
    """With buckets of these query sizes, each of which costs as many units, and ``step``."""
    table = BucketTable(
        tuple(BatchShape(WHOLE, query_len, 64, 64, 4) for query_len in query_lens),
        lambda bucket: step + bucket.query_len,
    )
    return Scheduler(
        StepLimits(
            max_num_batched_tokens=longest,
            max_num_seqs=4,
            max_model_len=64,
            block_size=4,
            num_blocks=64,
            decode_len=1,
            max_chunk_rows=1,
        ),
        ChunkTrimming(table, 4).num_postponed,
    )


def steps_of(served: Scheduler) -> list[int]:
    """Query tokens of each step until nothing is left."""
    sizes = []
    while (plan := served.plan()) is not None:
        sizes.append(plan.num_tokens)
        served.commit(plan, [1] * len(plan.sampled_rows))
    return sizes


def test_a_prompt_a_little_longer_than_a_bucket_is_cut_there() -> None:
    served = scheduler(4, 16, 64)
    served.add(make_request(prompt=[1] * 18, max_tokens=2, ignore_eos=True))
    assert steps_of(served) == [16, 2, 1]


def test_a_prompt_is_not_cut_where_another_step_costs_more_than_the_padding() -> None:
    served = scheduler(4, 16, 20, step=5.0)
    served.add(make_request(prompt=[1] * 18, max_tokens=2, ignore_eos=True))
    assert steps_of(served) == [18, 1]


def test_at_least_half_of_a_prompt_is_computed_at_once() -> None:
    # 4 tokens and then 15 would cost as much as 15 and then 4, and come first.
    served = scheduler(4, 15, 64)
    served.add(make_request(prompt=[1] * 19, max_tokens=2, ignore_eos=True))
    assert steps_of(served)[0] == 15


def test_a_cut_leaves_no_prompt_a_single_token_which_would_be_a_decode() -> None:
    served = scheduler(1, 16)
    served.add(make_request(prompt=[1] * 2, max_tokens=1, ignore_eos=True))
    assert steps_of(served) == [2]


def test_nothing_is_cut_while_somebody_waits() -> None:
    served = scheduler(4, 16, 64)
    for number in range(5):
        served.add(make_request(f"r{number}", [1] * (2 if number < 3 else 18), max_tokens=2, ignore_eos=True))
    assert steps_of(served)[0] == 3 * 2 + 18


@pytest.mark.parametrize(
    ("length", "sizes"),
    [(22, [16, 4, 2]), (38, [32, 4, 2]), (41, [32, 8, 1]), (43, [32, 8, 3])],
)
def test_every_token_of_a_prompt_is_computed_within_a_few_steps_more(length: int, sizes: list[int]) -> None:
    served = scheduler(2, 4, 8, 16, 32, 64)
    served.add(make_request(prompt=[1] * length, max_tokens=1, ignore_eos=True))
    assert steps_of(served) == sizes
    assert len(sizes) <= 1 + length.bit_length()


@pytest.mark.parametrize(("now", "next_step", "postponed"), [(3, 4, 0), (4, 3, 0), (4, 4, 3)])
def test_a_cut_step_and_the_next_have_as_many_logit_rows_as_the_whole_one(
    now: int, next_step: int, postponed: int
) -> None:
    request = make_request(prompt=[1] * 6)
    request.reserve_block_table(2)
    request.num_blocks = 2
    # In the fourth row, whose number is what counts.
    whole = StepPlan((ScheduledRow(request, 3, 0, 6, True),))
    cut = StepPlan((ScheduledRow(request, 3, 0, 3, False),))
    # A step has as many tokens as rows of logits, or padding.
    assert exact_shape(cut, 4) == replace(exact_shape(whole, 4), query_len=4)
    costs = {
        BatchShape(Phase(causal=True), 3, 0, 0, now): 3.0,
        BatchShape(Phase(causal=True, shared=True), 3, 1, 0, next_step): 10.0,
        BatchShape(WHOLE, 16, 64, 64, 4): 16.0,
    }
    assert ChunkTrimming(BucketTable(tuple(costs), costs.__getitem__), 4).num_postponed(whole) == postponed


def test_an_interruption_while_a_prompt_is_trimmed_loses_no_token() -> None:
    device = SimulatedDevice(64, 4, 4, uses_blocks=True)
    calls = []

    def interrupted(plan: StepPlan) -> int:
        calls.append(plan)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return 0

    served = Scheduler(
        StepLimits(
            max_num_batched_tokens=64,
            max_num_seqs=4,
            max_model_len=64,
            block_size=4,
            num_blocks=64,
            decode_len=1,
            max_chunk_rows=1,
        ),
        interrupted,
    )
    requests = [
        make_request(f"r{number}", [number + 1] * 7, max_tokens=1 if number == 0 else 6, ignore_eos=True)
        for number in range(3)
    ]
    for request in requests:
        served.add(request)
    plan = served.plan()
    assert plan is not None
    served.commit(plan, device.run(plan))
    # The first request has ended, so the last one's row has to move, and the copy is in no plan.
    with pytest.raises(KeyboardInterrupt):
        served.plan()
    assert calls[1].moves
    while (plan := served.plan()) is not None:
        served.commit(plan, device.run(plan))
    assert [request.output_token_ids.tolist() for request in requests] == [
        outputs_alone(request) for request in requests
    ]
    assert served.allocations.rows.num_used == served.allocations.blocks.num_used == 0
