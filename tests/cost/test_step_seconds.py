"""Seconds of many steps predicted at once, and tables that are planned by them."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import BatchShape, Phase, StepCost, StepLimits
from graphs.planner import Resolution, mean_padding, plan_table
from graphs.prices import price, to_levels
from hpu_duo.planning import (
    FITTED,
    GAUDI3,
    Deployment,
    Experts,
    ModelSize,
    Serving,
    predict_seconds,
    step_cost,
)
from hpu_duo.planning.roofline import StepSeconds
from kernels_ref import PLAIN
from tests.cost.test_capacity import LLAMA_3_8B
from tests.tiers import further

EXPERTS = ModelSize(
    "experts",
    LLAMA_3_8B.layers[:2],
    hidden_size=2048,
    vocab_size=1000,
    matrix_params=10**7,
    other_params=0,
    max_positions=131_072,
    experts=Experts(10**9, num_experts=128, num_per_token=8),
)


@st.composite
def shapes(draw: st.DrawFn) -> BatchShape:
    phase = draw(st.sampled_from(list(Phase.all())))
    num_shared, num_unique = (
        draw(st.integers(0, 6000)) if part else 0 for part in (phase.shared, phase.unique)
    )
    return BatchShape(phase, draw(st.integers(1, 9000)), num_shared, num_unique, draw(st.integers(1, 130)))


@settings(max_examples=40)
@given(
    st.lists(shapes(), min_size=1, max_size=12),
    st.sampled_from([(1, "heads"), (8, "heads"), (8, "context")]),
    st.sampled_from(["hpu", "reference"]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([LLAMA_3_8B, EXPERTS]),
)
def test_many_steps_are_predicted_as_each_by_itself(
    steps: list[BatchShape], devices: tuple[int, str], attention: str, sparsity: float, model: ModelSize
) -> None:
    num, parallel = devices
    serving = Serving(GAUDI3, num, attention=attention, retrieval_parallel=parallel)
    work = Deployment(model, serving, sparsity, PLAIN, 131_072).engine_work
    cost = StepSeconds(work, GAUDI3)
    each = [predict_seconds(work.of(step), GAUDI3, num, FITTED).total for step in steps]
    np.testing.assert_allclose(price(cost, to_levels(steps)), each, rtol=1e-12)
    np.testing.assert_allclose([cost(step) for step in steps], each, rtol=1e-12)


def recording(limits: StepLimits, seed: int) -> dict[BatchShape, int]:
    """Decodes of a number of rows that swings, some with shared blocks, and prompts beside them."""
    chance, found = random.Random(seed), dict[BatchShape, int]()
    for _ in range(300):
        rows = chance.randint(1, limits.max_num_seqs)
        unique = rows * chance.randint(1, 20)
        shared = chance.choice([0, 0, chance.randint(1, 64)])
        shape = BatchShape(Phase(unique=True, shared=shared > 0), rows, shared, unique, rows)
        if chance.random() < 0.2:
            query_len = rows + chance.randint(16, 1000)
            shape = replace(shape, phase=Phase(True, shared > 0, True), query_len=query_len)
        found[shape] = found.get(shape, 0) + 1
    return found


@pytest.mark.parametrize("seed", [1, *further(2)])
def test_a_table_planned_by_seconds_pads_less_than_one_planned_by_relative_cost(seed: int) -> None:
    limits = StepLimits(
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        max_model_len=8192,
        block_size=128,
        num_blocks=512,
        decode_len=1,
        max_chunk_rows=1,
    )
    seconds = step_cost(Deployment(LLAMA_3_8B, Serving(GAUDI3), 0.0, PLAIN, 8192))
    effort = Resolution(num_cells=300, num_points=80, num_rows=600, rounds=4)
    seen = recording(limits, seed)
    by_cost, by_seconds = (
        plan_table(limits, 24, seen, cost, resolution=effort) for cost in (StepCost(), seconds)
    )
    assert mean_padding(by_seconds, seen) < mean_padding(replace(by_cost, cost=seconds), seen)
