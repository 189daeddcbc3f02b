"""Predicted seconds of many steps at once are those of each."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import BatchShape, Phase
from graphs.planner.cells import price, to_levels
from hpu_duo.planning import FITTED, GAUDI3, Deployment, Experts, ModelSize, Serving, predict_seconds
from hpu_duo.planning.step_seconds import StepSeconds
from kernels_ref import PLAIN
from tests.cost.test_capacity import LLAMA_3_8B

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
