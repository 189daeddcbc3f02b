"""Memory of graphs: what is set aside, and what is left for keys and values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bias_builders import Window
from graphs import BatchShape, BucketTable
from graphs.backends.cuda import CudaBackend
from hpu_duo.config.limits import DeviceBudget
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.startup.tables import KEPT, GraphMemory, StepSizes, plan_with_graphs
from kernels_ref import Blocks, Rings
from kernels_ref.groups import HeadSizes
from tests.engine.tiny import PATTERN, Tiny
from tests.graphs.operator_graph import OperatorRecorder
from tests.kv.layers import layer_kv

MIB = 1 << 20
SIZES = StepSizes(
    hidden_size=512,
    intermediate_size=1024,
    vocab_size=1000,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    groups=frozenset({(Blocks(), HeadSizes(4, 2, 64, 2))}),
    block_size=16,
    dtype_bytes=2,
)
LONG, SHORT = BatchShape.parse("c--/q512/s0/u0/l1"), BatchShape.parse("--u/q4/s0/u8/l4")


def test_a_pool_is_as_large_as_its_largest_graph_and_results_are_kept_apart() -> None:
    memory = GraphMemory(KEPT["cuda"], 1, SIZES)
    results = (1 + 4) * 1000 * 2
    expected = 2 * KEPT["cuda"].code_bytes + results + SIZES.transient_bytes(LONG)
    assert memory.total_bytes([LONG, SHORT]) == expected


def test_graphs_without_a_pool_keep_each_its_own() -> None:
    memory = GraphMemory(KEPT["hpu-graph"], 1, SIZES)
    each = [SIZES.transient_bytes(shape) + SIZES.output_bytes(shape) for shape in (LONG, SHORT)]
    assert memory.total_bytes([LONG, SHORT]) == sum(each)
    assert GraphMemory(KEPT["hpu-graph"], 1, SIZES, 100).total_bytes([LONG, SHORT]) == each[1]


def test_code_is_counted_for_each_kind_of_layer_where_those_are_captured_apart() -> None:
    one, two = (GraphMemory(KEPT["compile"], kinds, SIZES).total_bytes([LONG]) for kinds in (1, 2))
    assert two - one == KEPT["compile"].code_bytes


LAYERS = (layer_kv(2, 0, 8, 0),) * 2


@given(
    free=st.integers(50_000, 10**7),
    per_block=st.integers(0, 3000),
    fixed=st.integers(0, 20_000),
)
def test_the_plan_leaves_free_what_its_own_graphs_need(free: int, per_block: int, fixed: int) -> None:
    """Whatever graphs take per block, the reserve covers the graphs of the plan that it leads to."""
    device = DeviceBudget(free, 0, free)
    bound = device.graph_bytes()
    sizes: dict[str, Any] = {"dtype_bytes": 2, "block_size": 16, "max_num_seqs": 2}
    smallest = MemoryPlan(LAYERS, num_blocks=2, **sizes).total_bytes

    def plan_of(graph_bytes: int) -> MemoryPlan:
        budget = max(smallest, device.kv_bytes(graph_bytes))
        return MemoryPlan.from_budget(LAYERS, kv_cache_bytes=budget, graph_bytes=graph_bytes, **sizes)

    def needed_of(plan: MemoryPlan) -> int:
        return min(bound, fixed + per_block * plan.num_blocks)

    plan = plan_with_graphs(plan_of, needed_of)
    assert needed_of(plan) <= plan.graph_bytes <= bound
    assert plan.total_bytes + plan.graph_bytes <= max(free, smallest + bound)


def load(tiny: Tiny, free: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> MemoryPlan:
    monkeypatch.setattr("hpu_duo.device.CpuRuntime.free_bytes", lambda self: free)
    served = tiny.load(
        device="cpu",
        pattern=PATTERN,
        graphs=CudaBackend(OperatorRecorder()),
        enable_prefix_caching=False,
        **options,
    )
    plan = served.engine.runner.store.plan
    assert served.stats().graph_bytes == plan.graph_bytes
    assert served.stats().kv_bytes == plan.total_bytes
    return plan


def test_a_given_reserve_comes_off_before_blocks_are_counted(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, reserve = 70_000, 20_000
    plan = load(tiny, free, monkeypatch, graph_memory_bytes=reserve)
    assert plan.graph_bytes == reserve
    budget = free * 9 // 10 - reserve
    assert plan.total_bytes <= budget < plan.total_bytes + plan.block_bytes
    assert load(tiny, free, monkeypatch, graph_memory_bytes=0).num_blocks > plan.num_blocks


def test_a_cache_of_a_given_size_must_fit_beside_the_reserve(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = load(tiny, 100_000, monkeypatch, graph_memory_bytes=0, num_blocks=12)
    room = plan.total_bytes + 5_000
    assert load(tiny, room, monkeypatch, graph_memory_bytes=5_000, num_blocks=12).num_blocks == 12
    problem = rf"needs {plan.total_bytes} bytes .* only {room - 5_001} bytes are free beside 5001 bytes"
    for size in ({"num_blocks": 12}, {"kv_cache_bytes": plan.total_bytes}):
        with pytest.raises(ValueError, match=problem):
            load(tiny, room, monkeypatch, graph_memory_bytes=5_001, **size)


def test_an_estimated_reserve_covers_the_graphs_of_the_table_and_the_staged_inputs(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ["--u/q4/s0/u8/l4", "csu/q16/s8/u8/l4"]
    table = BucketTable.from_strings(shapes)
    plan = load(tiny, 10**9, monkeypatch, buckets=table, num_blocks=8, max_model_len=64)
    config = tiny.model.config
    sizes = StepSizes(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_heads=4,
        num_kv_heads=2,
        head_dim=config.hidden_size // 4,
        groups=frozenset(
            {
                (Blocks(), HeadSizes(1, 2, config.hidden_size // 4, 4)),
                (Rings(Window(2, 6)), HeadSizes(1, 2, config.hidden_size // 4, 4)),
            }
        ),
        block_size=8,
        dtype_bytes=4,
    )
    pool = max(sizes.transient_bytes(bucket) for bucket in table)
    results = 2 * 4 * config.vocab_size * 4
    graphs = 2 * 4 * MIB + results + pool
    staged = plan.graph_bytes - graphs
    # 2 lists of up to 4 copies, 6 fields of 16 tokens, 7 of 4 rows, one ring, 8 shared blocks and 5 x 8 of
    # their slots, 8 owners, each from a multiple of 16 numbers on.
    by_hand = 2 * 16 + 6 * 16 + 7 * 16 + 16 + 16 + 48 + 8
    assert staged == 4 * by_hand


def test_an_estimate_takes_a_tenth_of_the_engines_share_at_most(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(tiny, 3 * MIB, monkeypatch).graph_bytes == int(0.1 * int(0.9 * 3 * MIB))
