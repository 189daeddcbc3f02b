"""Unified attention against a dense double loop, over random mixes of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from bias_builders import Window
from kernels_ref import Implementation, unified_attention
from tests.kernels_ref.scenario import RowSpec, Scenario, World, scenarios

QUICK = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
ALL = pytest.mark.parametrize("impl", list(Implementation))


def run(
    world: World, impl: Implementation, softcap: float | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    q, k, v, step = world.inputs()
    return unified_attention(q, k, v, world.cache, step, world.spec(impl, softcap), sinks)


@ALL
@QUICK
@given(scenario=scenarios().filter(lambda s: s.kr + s.ks > 0))
@example(
    scenario=Scenario((RowSpec(9, 1), RowSpec(0, 9)), 4, Window(2, 3), 1, 1, 1, 8, (0, 0, 0, 0), False, 0)
)
def test_mixed_steps_equal_dense_attention_although_unused_slots_hold_nan(
    impl: Implementation, scenario: Scenario
) -> None:
    world = World(scenario)
    out = run(world, impl)
    expected = world.dense()
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=2e-5)
    assert (out[len(expected) :] == 0).all(), "padded rows are zero"
