"""Heads with a rule attend to what it shows, with every implementation, and read no tile that it empties."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bias_builders import BlockTable, Dilated, Fixed, Rule, RuleIntersection, RuleUnion, Strided, Window
from kernels_ref import Implementation
from kernels_ref.chunks import ChunkBounds, Slices
from kernels_ref.sparse import reached_keys
from tests.bias_builders.plain_rules import plain, rules, tables
from tests.kernels_ref.choices import ALL, CHOICES, ON_HPU, REFERENCE, Choice
from tests.kernels_ref.scenario import TWO_SIZES, RowSpec, Scenario, World, scenarios
from tests.kernels_ref.test_unified import QUICK
from tests.tiers import crossed
from tests.triton_interpreter import replacing_once

pytestmark = pytest.mark.instruction_set

SMALL = {
    "slices": Slices(queries=4, masked_queries=4, band_queries=3, context_blocks=2, decode_slots=8),
    "chunks": ChunkBounds(key_bytes=256, key_slots=8, unique_bytes=256),
}
LOOPED = ChunkBounds(score_bytes=4096, mask_bytes=2048, unique_bytes=1000, key_slots=12, most_inline=1)
ONE_ROUND = LOOPED._replace(unique_bytes=1 << 30, most_inline=0, one_pass=True)


def ruled_scenarios(
    some: st.SearchStrategy[Rule], value_dims: tuple[int | None, ...] = TWO_SIZES
) -> st.SearchStrategy[Scenario]:
    def with_rule(scenario: Scenario, rule: Rule, kr: int) -> Scenario:
        return replace(scenario, rule=rule, kr=kr)

    return st.builds(with_rule, scenarios(value_dims), some, st.integers(1, 2))


def assert_equals_dense(choice: Choice, scenario: Scenario, **sizes: Any) -> None:
    world = World(scenario)
    out, expected = choice.attend(world, **sizes), world.dense()
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=1e-4)
    assert not out[len(expected) :].any(), "padded rows are zero"


@pytest.mark.parametrize("is_small", [False, True])
@ALL
@settings(QUICK, max_examples=8)
@given(scenario=ruled_scenarios(rules()))
def test_output_equals_dense_attention_under_the_rule(
    choice: Choice, is_small: bool, scenario: Scenario
) -> None:
    assert_equals_dense(choice, scenario, **(SMALL if is_small else {}))


def _skip_on_gpus() -> None:
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here, and these tensors are on the CPU")


def triton_equals_dense(scenario: Scenario) -> None:
    pytest.importorskip("triton")
    _skip_on_gpus()
    with replacing_once():
        assert_equals_dense(Choice(Implementation.TRITON), scenario)


@settings(QUICK, max_examples=3)
@given(scenario=ruled_scenarios(rules(), (None,)))
def test_triton_kernels_equal_dense_attention_under_the_rule(scenario: Scenario) -> None:
    triton_equals_dense(scenario)


@pytest.mark.slow
@pytest.mark.exhaustive
@settings(QUICK, max_examples=60)
@given(scenario=ruled_scenarios(rules(), (None,)))
def test_triton_kernels_equal_dense_attention_under_many_rules(scenario: Scenario) -> None:
    triton_equals_dense(scenario)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("is_small", [False, True])
@ALL
@settings(QUICK, max_examples=150)
@given(scenario=ruled_scenarios(rules()))
def test_output_equals_dense_attention_under_many_rules(
    choice: Choice, is_small: bool, scenario: Scenario
) -> None:
    assert_equals_dense(choice, scenario, **(SMALL if is_small else {}))


@ON_HPU
@pytest.mark.parametrize("bounds", [LOOPED, ONE_ROUND], ids=["chunks", "one round"])
@settings(QUICK, max_examples=6)
@given(scenario=ruled_scenarios(rules()))
def test_loops_outside_of_graphs_equal_dense_attention_under_the_rule(
    choice: Choice, bounds: ChunkBounds, scenario: Scenario
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # As if a compiler traced the layer, which makes loops operators.
        patch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
        assert_equals_dense(choice, scenario, slices=Slices(3, 3), chunks=bounds)


@ON_HPU
@settings(QUICK, max_examples=15)
@given(scenario=ruled_scenarios(rules()), softcap=st.sampled_from([5.0, 50.0]))
def test_soft_caps_apply_under_a_rule(choice: Choice, scenario: Scenario, softcap: float) -> None:
    world = World(scenario)
    out, expected = choice.attend(world, softcap), world.dense(softcap)
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "rule", "choice"),
    crossed(
        [torch.bfloat16, torch.float16],
        {str(rule): rule for rule in (RuleUnion((Window(2, 6), Dilated(9, 4))), Window(0, 45))},
        {**CHOICES, "triton": Choice(Implementation.TRITON)},
    ),
)
def test_half_precision_stays_close_to_the_exact_result_of_the_same_inputs(
    choice: Choice, dtype: torch.dtype, rule: Rule
) -> None:
    if choice.impl is Implementation.TRITON:
        pytest.importorskip("triton")
        _skip_on_gpus()
    rows = (RowSpec(40, 1), RowSpec(30, 12), RowSpec(0, 20), RowSpec(33, 1, 2))
    scenario = Scenario(rows, 8, Window(4, 8), 2, 0, 3, 32, (2, 1, 1, 1), False, 11, rule=rule)
    world = World(scenario, dtype)
    expected = world.dense()
    with replacing_once():
        error = (choice.attend(world)[: len(expected)].double() - expected).abs()
    # Values are of size 1 and weights sum to 1: a few roundings of half an epsilon each.
    assert error.max() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("choice", [REFERENCE, CHOICES["sdpa"]], ids=["reference", "sdpa"])
@settings(QUICK, max_examples=15)
@given(scenario=ruled_scenarios(tables()))
def test_a_table_of_blocks_is_served_on_a_cpu(choice: Choice, scenario: Scenario) -> None:
    assert_equals_dense(choice, scenario)


@given(rules(), st.integers(0, 30), st.integers(1, 8), st.integers(1, 7))
def test_keys_that_are_left_out_by_distance_are_seen_by_nobody(
    rule: Rule, begin: int, size: int, tile: int
) -> None:
    end = begin + size
    kept = np.zeros(end, bool)
    for place in reached_keys(rule, begin, end, tile):
        assert not kept[place].any()
        kept[place] = True
    first = int(kept.argmax())
    for query in range(begin, end):
        for key in np.flatnonzero(~kept[: query + 1]).tolist():
            # A rule with sinks leaves out only what lies before the first key.
            is_sink = key < rule.sink and key < first
            assert is_sink or not plain(rule, query, key)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (None, [(0, 1024)]),
        (Window(4, 100), [(413, 1024)]),
        (Dilated(64, 2), [(384, 1024)]),
        (Strided(2048), [(0, 1024)]),
        (Fixed(128, 8), [(0, 1024)]),
        (RuleUnion((Window(0, 100), Dilated(2, 500))), [(0, 1024)]),
        (RuleIntersection((Window(4, 200), Strided(8))), [(256, 1024)]),
        (BlockTable(128, ((0,),)), [(0, 1024)]),
    ],
)
def test_the_second_slice_of_a_prompt_meets_the_keys_that_it_reaches(
    rule: Rule | None, expected: list[tuple[int, int]]
) -> None:
    assert [(place.start, place.stop) for place in reached_keys(rule, 512, 1024)] == expected


def test_distances_between_a_stride_and_the_next_are_left_out() -> None:
    places = reached_keys(Strided(1024), 4096, 4224)
    gaps = [(a.stop, b.start) for a, b in pairwise(places)]
    assert gaps == [(128, 1024), (1152, 2048), (2176, 3072)]
