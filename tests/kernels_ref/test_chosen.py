"""Prompts that choose blocks: implementations agree, whatever unused slots hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bias_builders import TopBlocks, Window
from kernels_ref import ChosenBlocks, HeadGroup
from kernels_ref.chunks import ChunkBounds, Slices
from tests.kernels_ref.choices import CHOICES
from tests.kernels_ref.scenario import RowSpec, Scenario, World

pytestmark = pytest.mark.instruction_set

QUICK = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def aligned(draw: st.DrawFn) -> Scenario:
    """Decode rows, and prompt rows that begin at a border of blocks; some share context."""
    size = draw(st.sampled_from([2, 4, 8]))
    decode = st.builds(RowSpec, st.integers(0, 40), st.just(1), st.integers(0, 4))
    begin = st.integers(0, 6).map(lambda number: number * size)
    prompt = st.builds(RowSpec, begin, st.integers(2, 6 * size), st.integers(0, 4))
    return Scenario(
        rows=tuple(draw(st.lists(st.one_of(decode, prompt, prompt), min_size=1, max_size=4))),
        block_size=size,
        window=Window(0, 1),
        kr=draw(st.integers(1, 2)),
        ks=0,
        group=draw(st.sampled_from([1, 3])),
        head_dim=8,
        pad=tuple(draw(st.integers(0, 5)) for _ in range(4)),
        all_parts=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31 - 1)),
        is_spread=draw(st.booleans()),
    )


SMALL = {
    "slices": Slices(8, 8, context_blocks=2),
    "chunks": ChunkBounds(score_bytes=4096, key_bytes=256, unique_bytes=1000),
}
"""Every loop goes round several times."""


def attend(scenario: Scenario, most: int, implementation: str, **sizes: Any) -> torch.Tensor:
    world = World(scenario)
    world.groups = (HeadGroup(scenario.kr, ChosenBlocks(TopBlocks(most), 1 << 20)),)
    return CHOICES[implementation].attend(world, **sizes)[: len(world.queries)]


@QUICK
@given(scenario=aligned(), most=st.integers(3, 6))
@example(
    scenario=Scenario(
        (RowSpec(24, 30), RowSpec(50, 1, 6)), 4, Window(0, 1), 2, 0, 3, 8, (3, 2, 1, 2), True, 7
    ),
    most=3,
)
def test_implementations_agree_although_unused_slots_hold_nan(scenario: Scenario, most: int) -> None:
    portable, skipping = (attend(scenario, most, name) for name in ("reference", "sdpa"))
    assert portable.isfinite().all()
    torch.testing.assert_close(skipping, portable, atol=2e-5, rtol=2e-5)
    for name in ("reference", "sdpa"):
        torch.testing.assert_close(attend(scenario, most, name, **SMALL), portable, atol=2e-5, rtol=2e-5)


@QUICK
@given(scenario=aligned())
@pytest.mark.parametrize("implementation", ["reference", "sdpa"])
def test_as_many_blocks_as_there_are_are_dense_attention(implementation: str, scenario: Scenario) -> None:
    expected = World(scenario).dense()
    out = attend(scenario, 100, implementation)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
