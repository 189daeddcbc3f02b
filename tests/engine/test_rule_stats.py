"""Tiles that a rule leaves are counted, and are what the kernels of a CPU compute."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bias_builders import Dilated, Fixed, Rule, RuleUnion, Strided, TopBlocks, Window, encode_rule
from hpu_duo.engine.telemetry import TILE, TileCounts, count_chosen, count_tiles
from kernels_ref import NewKV, Step
from kernels_ref.sdpa.sparse import chosen_blocks, sparse_causal, sparse_shared
from kernels_ref.units import write_indices
from tests.bias_builders.plain_rules import plain
from tests.engine.tiny import Tiny
from tests.kernels_ref.scenario import RowSpec, Scenario, World

RULES = [
    Window(4, 100),
    Dilated(5, 70),
    Strided(200),
    Fixed(256, 20),
    RuleUnion((Window(0, 9), Strided(300))),
]
LENGTH = 5 * TILE + 40


class Pairs(TorchDispatchMode):
    """Counts the pairs of queries and keys of fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.num += args[0].shape[2] * args[1].shape[2]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tiles_without_a_visible_pair_are_not_counted(rule: Rule) -> None:
    length, expected, dense = 3 * TILE, 0, 0
    for first in range(0, length, TILE):
        for key in range(0, first + TILE, TILE):
            dense += 1
            queries, keys = range(first, first + TILE), range(key, key + TILE)
            expected += any(plain(rule, i, j) for i in queries for j in keys)
    assert count_tiles(rule, 0, length) == TileCounts(expected, dense)


@pytest.mark.parametrize("start", [0, 3 * TILE])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_prompt_on_a_cpu_computes_the_tiles_that_are_counted(rule: Rule, start: int) -> None:
    rows = (RowSpec(start, 2 * TILE),)
    world = World(Scenario(rows, TILE, Window(0, 1), 1, 0, 1, 8, (0, 0, 0, 0), False, 0, rule=rule))
    q, k, v, step = world.inputs()
    assert isinstance(step, Step)
    t, numbers = step.tensors, encode_rule(rule)
    with Pairs() as pairs:
        row = t.row_start, t.row_num_new, t.row_query_start
        sparse_causal(q[:, :, None], k, v, *row, t.causal_row, numbers, TILE)
        shared = t.shared_block, t.shared_start, t.shared_reads
        sparse_shared(q[:, :, None], *world.blocks.views, *row, *shared, numbers, TILE, 2)
    assert pairs.num == count_tiles(rule, start, start + 2 * TILE).num_tiles * TILE * TILE


def test_counts_of_chunks_add_up_to_those_of_the_prompt_where_chunks_end_at_tiles() -> None:
    for rule in RULES:
        whole = count_tiles(rule, 0, LENGTH)
        parts = count_tiles(rule, 0, 2 * TILE).plus(count_tiles(rule, 2 * TILE, LENGTH))
        assert parts == whole
        assert whole.num_tiles <= whole.num_dense_tiles


def test_an_engine_tells_the_rule_and_its_tiles(tiny: Tiny) -> None:
    rule = Window(0, 30)
    served = tiny.load(attention_rule="band:width=30", max_num_batched_tokens=TILE, max_model_len=2 * TILE)
    served.generate([list(range(3, 63)) * 3], max_new_tokens=3, eos_token_id=None)
    (stats,) = served.stats().attention_rules
    assert stats.rule == "band:width=30"
    # Two chunks, and two tokens that are decoded.
    ends = (0, TILE, 180, 181, 182)
    expected = TileCounts()
    for start, end in pairwise(ends):
        expected = expected.plus(count_tiles(rule, start, end))
    assert stats.tiles == expected
    assert stats.tiles.num_tiles < stats.tiles.num_dense_tiles
    assert not tiny.load().stats().attention_rules


@pytest.mark.parametrize(("start", "num_tiles"), [(0, 3), (2 * TILE, 5), (9 * TILE, 1)])
def test_a_prompt_that_chooses_computes_the_blocks_that_are_counted(start: int, num_tiles: int) -> None:
    rows = (RowSpec(start, num_tiles * TILE),)
    world = World(Scenario(rows, TILE, Window(0, 1), 1, 0, 1, 8, (0, 0, 0, 0), False, 0))
    q, k, v, step = world.inputs()
    assert isinstance(step, Step)
    t, layout = step.tensors, world.blocks.layout
    index = write_indices(t.write_block, t.write_offset, [layout])[layout]
    world.blocks.write(index, world.blocks.encode(NewKV(k, v)))
    with Pairs() as pairs:
        row = t.row_start, t.row_num_new, t.row_query_start, t.causal_row
        shared = t.shared_block, t.shared_start, t.shared_reads
        chosen_blocks(q[:, :, None], *world.blocks.views, *row, t.write_block, *shared, 4, 2)
    counts = count_chosen(TopBlocks(4), start, start + num_tiles * TILE, TILE)
    assert pairs.num == counts.num_tiles * TILE * TILE


def test_tiles_that_are_not_whole_see_all_blocks_and_others_as_many_as_they_choose() -> None:
    assert count_chosen(TopBlocks(3), 0, 50, 10) == TileCounts(1 + 2 + 3 * 3, 15)
    assert count_chosen(TopBlocks(3), 20, 47, 10) == TileCounts(3 + 3 + 5, 3 + 4 + 5)
    assert count_chosen(TopBlocks(3), 47, 48, 10) == TileCounts(5, 5)


def test_an_engine_tells_the_choice_and_its_blocks(tiny: Tiny) -> None:
    served = tiny.load(attention_rule="top_blocks:blocks=3")
    served.generate([list(range(3, 63))], max_new_tokens=3, eos_token_id=None)
    (stats,) = served.stats().attention_rules
    size, counts = served.engine.scheduler.limits.block_size, TileCounts()
    assert size == 8
    for start, end in ((0, 60), (60, 61), (61, 62)):
        counts = counts.plus(count_chosen(TopBlocks(3), start, end, size))
    assert (stats.rule, stats.tiles) == ("top_blocks:blocks=3", counts)
