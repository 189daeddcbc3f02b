"""The base of the curves: placed contexts, exact bytes, and layouts of single parts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu_suite.balance import Work, cut_split, cut_stream_k
from benchmarks.gpu_suite.cases import Heads, RowSize, as_keys, lay_out
from benchmarks.gpu_suite.engines import (
    Setup,
    add_prompt,
    engine_of,
    make_model,
    place_context,
)
from benchmarks.gpu_suite.kernel_cases import visible_pairs
from benchmarks.gpu_suite.memory import (
    DUO,
    FULL,
    SYSTEMS,
    context_reaching,
    kv_plan,
    make_pattern,
    weight_bytes,
)
from benchmarks.gpu_suite.rivals import Dense
from benchmarks.gpu_suite.shapes import LLAMA_2_7B, LLAMA_3_8B, REAL, TOY, ModelShape
from bias_builders import Window, sees_streaming
from hpu_duo.engine.engine import Engine
from hpu_duo.heads.permute import ORDER_ATTRIBUTE
from hpu_duo.modeling.attention import LAYER_ATTRIBUTE
from kernels_ref import Blocks
from kernels_ref.triton.launch import DeviceLimits
from kernels_ref.triton.stream_k_choice import num_workers
from tests.tiers import crossed

CPU = torch.device("cpu")
SETUP = Setup(CPU, torch.float32, "auto", "eager", block_size=16)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model(TOY.models[0], 256, SETUP)


def _lease(engine: Engine) -> tuple[object, ...]:
    [request] = (state.request for state in engine._samples)
    blocks = request.block_table[: request.num_blocks].tolist()
    return request.row, blocks, request.num_computed_tokens, request.num_tokens, engine.scheduler.num_running


def test_a_model_whose_heads_were_permuted_is_served_again() -> None:
    shape = replace(TOY.models[0], num_layers=4, retrieval_share=0.5)
    permuted = make_model(shape, 256, SETUP)
    for _ in range(2):
        with engine_of(permuted, shape, DUO, SETUP, num_tokens=32, chunk=16):
            assert any(hasattr(module, ORDER_ATTRIBUTE) for module in permuted.modules())


@pytest.mark.slow
@pytest.mark.parametrize(("system", "length"), crossed(SYSTEMS, [1, 33, 48]))
def test_a_placed_context_holds_what_a_prefill_would_hold(
    model: torch.nn.Module, system: str, length: int
) -> None:
    allocations, shapes = [], []
    for place in (True, False):
        with engine_of(model, TOY.models[0], system, SETUP, num_tokens=64, chunk=16) as engine:  # type: ignore[arg-type]
            if place:
                place_context(engine, length, 8)
            else:
                add_prompt(engine, length, 8)
                while not any(output.token_ids for output in engine.step()):
                    pass
            allocations.append(_lease(engine))
            engine.step()
            shapes.append(engine.stats().steps["--u"])
            used = engine.runner.store.layers[0][-1].views[0] if system == DUO else None
            assert used is None or bool(torch.isfinite(used).all())
    assert allocations[0] == allocations[1]
    # The last chunk of a prompt may be one token, and then looks like a decode.
    assert shapes[1] - shapes[0] == (length % 16 == 1)


def test_a_model_is_given_back_as_it_was(model: torch.nn.Module) -> None:
    with engine_of(model, TOY.models[0], DUO, SETUP, num_tokens=64, chunk=16):  # type: ignore[arg-type]
        pass
    for module in model.modules():
        assert not hasattr(module, LAYER_ATTRIBUTE)
        assert "forward" not in vars(module)


@pytest.mark.parametrize("system", SYSTEMS)
def test_computed_bytes_are_those_of_the_engine_s_stores(model: torch.nn.Module, system: str) -> None:
    with engine_of(model, TOY.models[0], system, SETUP, num_tokens=100, chunk=16) as engine:  # type: ignore[arg-type]
        assert kv_plan(TOY.models[0], system, 100, 16, 4).total_bytes == engine.runner.store.num_bytes
    assert weight_bytes(TOY.models[0], 4) == sum(x.nbytes for x in model.parameters())


def test_llama_3_8b_at_a_million_tokens_takes_the_bytes_of_the_papers_formula() -> None:
    tokens, token_bytes, slot = 1 << 20, 2 * 8 * 128 * 2, 2 * 128 * 2
    spare = 1  # the null block, and the null row
    full = kv_plan(LLAMA_3_8B, FULL, tokens, 128, 2).total_bytes
    assert full == 32 * token_bytes * (tokens + 128 * spare)
    duo = kv_plan(LLAMA_3_8B, DUO, tokens, 128, 2).total_bytes
    scratch = 1  # the copy of a ring that a prompt reads
    rings = 32 * 4 * slot * (64 + 256) * (1 + spare + scratch)
    assert duo == 32 * 4 * slot * (tokens + 128 * spare) + rings


@pytest.mark.parametrize("shape", [LLAMA_2_7B, LLAMA_3_8B])
def test_patterns_keep_the_published_share_of_heads_evenly(shape: ModelShape) -> None:
    counts = {retrieval for retrieval, _ in make_pattern(shape).head_counts}
    assert counts == {round(shape.num_kv_heads * shape.retrieval_share)}


@settings(deadline=None, max_examples=30)
@given(
    ratio=st.floats(1.01, 4.5),
    weights=st.integers(0, 20 << 30),
    shape=st.sampled_from([LLAMA_2_7B, LLAMA_3_8B]),
)
def test_the_context_that_reaches_a_ratio_is_the_shortest_one(
    ratio: float, weights: int, shape: ModelShape
) -> None:
    wanted = round(ratio, 3)

    def reaches(context: int) -> bool:
        full, duo = (kv_plan(shape, system, context, 128, 2).total_bytes + weights for system in SYSTEMS)
        return full * 1000 >= round(wanted * 1000) * duo

    context = context_reaching(wanted, shape, weights, 128, 2)
    if context is None:
        assert not reaches(1 << 40)
    else:
        assert reaches(context)
        assert context == 128 or not reaches(context - 128)


@given(length=st.integers(0, 40), sink=st.integers(0, 6), recent=st.integers(1, 9))
def test_visible_pairs_are_counted_as_the_token_rule_says(length: int, sink: int, recent: int) -> None:
    window = Window(sink, recent)
    pairs = sum(bool(sees_streaming(q, k, window)) for q in range(length) for k in range(length))
    assert visible_pairs(length, window) == pairs
    assert visible_pairs(length, None) == sum(q >= k for q in range(length) for k in range(length))


@pytest.mark.parametrize(("name", "contexts"), REAL.ragged)
def test_ragged_batches_lay_every_full_block_in_the_slice_and_own_it_once(
    name: str, contexts: tuple[int, ...]
) -> None:
    rows = [RowSize(context - 1, 1) for context in contexts]
    layout = lay_out(rows, 128, CPU, heads=Heads(1, 1, 16))
    owners = torch.bincount(layout.tensors.owner, minlength=len(contexts))[: len(contexts)]
    tails = layout.plans[Blocks()].tails.visible.flatten()
    assert (owners * 128 + tails).tolist() == list(contexts)


def test_one_row_s_blocks_are_its_keys_in_order() -> None:
    store = torch.arange(4 * 2 * 8 * 3, dtype=torch.float32).view(4, 2, 8, 3)
    dense = as_keys(store, 20)
    for token in range(20):
        assert torch.equal(dense[0, :, token], store[token // 8, :, token % 8])


def test_causal_attention_of_others_needs_as_many_queries_as_keys() -> None:
    q, k = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match="as many queries as keys for causal attention, got 3 and 5"):
        Dense(q, k, k, causal=True)


@st.composite
def plans(draw: st.DrawFn) -> Work:
    num_rows = draw(st.integers(1, 4))
    owner = draw(st.lists(st.integers(0, num_rows), max_size=60))
    tails = draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    return Work(np.array(owner, np.int32), np.array(tails))


@given(work=plans(), num_heads=st.integers(1, 5), num_processors=st.integers(1, 6))
def test_stream_k_s_cut_is_what_workers_that_walk_the_line_would_do(
    work: Work, num_heads: int, num_processors: int
) -> None:
    limits = DeviceLimits(num_processors, 1 << 16)
    cut = cut_stream_k(work, num_heads, limits)
    tiles = [
        (head, row)
        for head in range(num_heads)
        for row in range(work.num_rows)
        for _ in range(int((work.owner == row).sum()) + int(work.has_tail[row]))
    ]
    workers = num_workers(limits)
    ranges = [
        tiles[worker * len(tiles) // workers : (worker + 1) * len(tiles) // workers]
        for worker in range(workers)
    ]
    loads = [len(part) for part in ranges]
    assert cut.total == sum(loads)
    assert cut.busiest == max(loads)
    assert max(loads) - min(loads) <= 1, "equal up to one block"
    touched = [(tile, worker) for worker, part in enumerate(ranges) for tile in dict.fromkeys(part)]
    holders = Counter(tile for tile, _ in touched)
    assert cut.num_triples == sum(count for count in holders.values() if count > 1)


@given(work=plans(), num_heads=st.integers(1, 5), num_processors=st.integers(1, 6))
def test_both_cuts_read_the_same_blocks_and_are_busy_at_most_all_the_time(
    work: Work, num_heads: int, num_processors: int
) -> None:
    limits = DeviceLimits(num_processors, 1 << 16)
    even, split = cut_stream_k(work, num_heads, limits), cut_split(work, num_heads, limits)
    assert even.total == split.total
    if even.total:
        assert 0 < even.evenness <= 1


def test_an_empty_half_of_the_slice_leaves_half_of_the_split_s_programs_idle() -> None:
    owner = np.repeat(np.array([0, 1, 2, 2], np.int32), 512)  # row 2 is nobody
    work = Work(owner, np.zeros(2, bool))
    limits = DeviceLimits(64, 1 << 16)
    assert cut_split(work, 8, limits).evenness == 0.5
    assert cut_stream_k(work, 8, limits).evenness == 1.0
