"""Stream-K against dense attention in float64, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from benchmarks.gpu_suite.cases import Heads, RowSize, lay_out, queries, random
from bias_builders import Window
from kernels_ref import Blocks, Implementation, normalise, of_stores, reference, unified_attention
from kernels_ref.partial import FLOOR, Partial
from kernels_ref.triton import availability
from kernels_ref.triton.launch import INTERPRETER, DeviceLimits, Triple
from kernels_ref.triton.stream_k_choice import choose, num_workers
from tests.kernels_ref.parts import inputs_of
from tests.kernels_ref.scenario import RowSpec, Scenario, scenarios
from tests.kernels_ref.scenario import World as Steps
from tests.triton_interpreter import replacing_once

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
runs = pytest.mark.skipif(availability.problem(DEVICE) is not None, reason="Triton cannot run here")
QUICK = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True, scope="module")
def _fast_interpreter() -> Iterator[None]:
    with replacing_once():
        yield


@dataclass(frozen=True)
class Case:
    """Owners of blocks, and the partly filled block of each row."""

    owner: tuple[int, ...]
    tails: tuple[int, ...]
    block_size: int
    workers: int
    seed: int

    @property
    def num_rows(self) -> int:
        return len(self.tails)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_rows = draw(st.integers(1, 4))
    block_size = draw(st.sampled_from([1, 4, 8, 24]))
    return Case(
        owner=tuple(draw(st.lists(st.integers(0, num_rows), max_size=12))),
        tails=tuple(draw(st.integers(0, block_size - 1)) for _ in range(num_rows)),
        block_size=block_size,
        workers=draw(st.integers(1, 20)),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


class World:
    """A case in stores: the slice, the tails in reverse order, then null units; unused slots hold NaN."""

    def __init__(
        self,
        case: Case,
        dtype: torch.dtype = torch.float32,
        *,
        num_heads: int = 2,
        group: int = 2,
        head_dim: int = 32,
    ) -> None:
        self.case = case
        gen = torch.Generator().manual_seed(case.seed)
        num_blocks, num_rows = len(case.owner), case.num_rows
        shape = (num_blocks + num_rows + 1, num_heads, case.block_size, head_dim)
        self.k, self.v = torch.full((2, *shape), torch.nan, dtype=dtype)
        for block, owner in enumerate(case.owner):
            if owner < num_rows:
                self.k[block] = torch.randn(shape[1:], generator=gen)
                self.v[block] = torch.randn(shape[1:], generator=gen)
        self.tail_block = torch.arange(num_blocks + num_rows - 1, num_blocks - 1, -1, dtype=torch.int32)
        for block, seen in zip(self.tail_block, case.tails):
            for store in (self.k, self.v):
                store[block, :, :seen] = torch.randn(num_heads, seen, head_dim, generator=gen)
        self.q = torch.randn(num_rows, num_heads, group, head_dim, generator=gen).to(dtype)

    def plan(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        owner = torch.tensor(self.case.owner, dtype=torch.int32)
        seen = torch.tensor(self.case.tails, dtype=torch.int32)
        return owner, self.tail_block[:, None], seen[:, None, None]

    def run(self, workers: int | None = None, softcap: float = 0.0) -> Partial:
        from kernels_ref.triton.stream_k import stream_k

        q, k, v, owner, tail_block, seen = (x.to(DEVICE) for x in (self.q, self.k, self.v, *self.plan()))
        workers = self.case.workers if workers is None else workers
        out = stream_k(q, k, v, owner, tail_block, seen, softcap, workers=workers)
        return Partial(*(x.cpu() for x in out))

    def keys_of(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a row, float64 ``[K, T, D]``, from the owners by a plain loop."""
        own = [block for block, owner in enumerate(self.case.owner) if owner == row]
        tail, seen = int(self.tail_block[row]), self.case.tails[row]
        return tuple(  # type: ignore[return-value]
            torch.cat([*(store[b] for b in own), store[tail, :, :seen]], dim=1).double()
            for store in (self.k, self.v)
        )

    def dense(self, row: int, softcap: float = 0.0) -> Partial:
        keys, values = self.keys_of(row)
        scores = self.q[row].double() @ keys.transpose(1, 2)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        largest = scores.amax(-1)
        weights = torch.exp(scores - largest[..., None])
        return Partial(weights @ values, largest, weights.sum(-1))

    def check(self, got: Partial, tolerance: float, softcap: float = 0.0) -> None:
        for row in range(self.case.num_rows):
            mine = Partial(*(x[row].double() for x in got))
            if self.keys_of(row)[0].shape[1] == 0:
                assert (mine.attn == 0).all()
                assert set(mine.max.flatten().tolist()) == {float(np.float32(FLOOR))}
                assert (mine.sum == 0).all()
                continue
            expected = self.dense(row, softcap)
            for part, wanted in zip(mine, expected):
                torch.testing.assert_close(part, wanted, atol=tolerance, rtol=tolerance)


@runs
@QUICK
@given(case=cases())
def test_any_owners_tails_and_numbers_of_workers_give_the_dense_triple(case: Case) -> None:
    world = World(case)
    world.check(world.run(), 2e-5)


@runs
@QUICK
@given(case=cases())
def test_every_visible_slot_is_counted_once_whoever_reads_it(case: Case) -> None:
    world = World(case)
    world.q.zero_()  # all scores are 0, so the sum of weights is a number of slots, exactly
    expected = torch.tensor([world.keys_of(row)[0].shape[1] for row in range(case.num_rows)])
    counted = world.run().sum
    assert (counted == expected[:, None, None]).all()


@runs
@QUICK
@given(case=cases())
def test_the_map_is_a_stable_sort_of_the_blocks_by_row_with_tails_last(case: Case) -> None:
    from kernels_ref.triton.stream_k import build_work_map

    world = World(case)
    owner, tail_block, tail_visible = (x.to(DEVICE) for x in world.plan())
    work = build_work_map(owner, tail_block, tail_visible, case.block_size)
    expected = [
        [(block, case.block_size) for block, owner in enumerate(case.owner) if owner == row]
        + ([(int(world.tail_block[row]), seen)] if seen else [])
        for row, seen in enumerate(case.tails)
    ]
    assert work.row_begin.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
    items = list(zip(work.block.tolist(), work.visible.flatten().tolist()))
    assert items[: sum(map(len, expected))] == [item for items_of_row in expected for item in items_of_row]


LONG = Case(owner=(0, 2, 1, 0, 0, 0, 3, 0, 0, 1, 0, 0), tails=(5, 0, 7), block_size=8, workers=5, seed=3)


@runs
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
def test_head_sizes_and_groups_that_are_no_powers_of_two_give_the_same(group: int, head_dim: int) -> None:
    world = World(LONG, num_heads=1, group=group, head_dim=head_dim)
    world.check(world.run(), 1e-4)


@runs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_weights_and_nothing_else(dtype: torch.dtype) -> None:
    world = World(LONG, dtype)
    world.check(world.run(), 4 * torch.finfo(dtype).eps)


@runs
@pytest.mark.parametrize("softcap", [2.0, 30.0])
def test_the_soft_cap_bends_scores_before_their_maximum(softcap: float) -> None:
    world = World(LONG)
    world.check(world.run(softcap=softcap), 2e-5, softcap)


@runs
def test_the_number_of_workers_changes_rounding_only_and_a_repetition_nothing() -> None:
    world = World(LONG)
    first = world.run(workers=7)
    for mine, again in zip(first, world.run(workers=7)):
        assert torch.equal(mine, again)
    for workers in (1, 2, 24):
        world.check(world.run(workers=workers), 2e-5)


@runs
def test_slots_that_nobody_owns_are_not_read() -> None:
    """With NaN in every unused slot the results are those of clean stores, bit by bit."""
    poisoned = World(LONG)
    clean = World(LONG)
    for store in (clean.k, clean.v):
        store.nan_to_num_(0.0)
    for mine, other in zip(poisoned.run(), clean.run()):
        assert torch.equal(mine, other)


@runs
def test_queries_may_be_a_slice_of_more_heads() -> None:
    world = World(LONG)
    wide = torch.cat([world.q, torch.full_like(world.q, torch.nan)], dim=1)
    world.q = wide[:, : world.q.shape[1]]
    world.check(world.run(), 2e-5)


@runs
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_unique_part_runs_as_the_choice_says(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    """Whichever kernel runs, the operator gives the dense triple."""
    from kernels_ref.triton import operators, stream_k, unique_blocks

    called: list[str] = []
    kernels = {"stream_k": stream_k.stream_k, "split_unique_blocks": unique_blocks.split_unique_blocks}

    def noting(name: str) -> Callable[..., Triple]:
        def run(*arguments: Any) -> Triple:
            called.append(name)
            return kernels[name](*arguments)

        return run

    for name in kernels:
        monkeypatch.setattr(unique_blocks, name, noting(name))
    num_blocks = 4 * num_workers(INTERPRETER)
    owner = tuple(block % num_rows for block in range(num_blocks))
    world = World(Case(owner, (1,) * num_rows, 4, 1, 5), num_heads=1)
    monkeypatch.setattr(unique_blocks.launch, "device_limits", lambda device: INTERPRETER)
    arguments = (x.to(DEVICE) for x in (world.q, world.k, world.v, *world.plan()))
    out = Partial(*(x.cpu() for x in operators.unique_blocks(*arguments, 0.0)))
    assert called == ["stream_k" if num_rows > 1 else "split_unique_blocks"]
    world.check(out, 2e-5)


MIXED = Scenario(
    (RowSpec(41, 1), RowSpec(9, 4), RowSpec(23, 1, 2)), 4, Window(2, 6), 1, 1, 2, 8, (1, 1, 3, 1), True, 7
)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu" or availability.problem(DEVICE) is not None, reason="needs a CPU")
@settings(QUICK, max_examples=6)
@given(scenario=scenarios().filter(lambda s: s.kr > 0 and any(row.num_new == 1 for row in s.rows)))
@example(scenario=MIXED)
def test_mixed_steps_whose_unique_part_is_stream_k_equal_dense_attention(scenario: Scenario) -> None:
    from kernels_ref.triton import unique_blocks

    world = Steps(scenario)
    q, k, v, step = world.inputs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unique_blocks, "choose", lambda *_, **__: True)
        out = unified_attention(q, k, v, world.cache, step, world.spec(Implementation.TRITON))  # type: ignore[arg-type]
    expected = world.dense()
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    "contexts", [(1 << 17,), (1 << 17, *[1 << 10] * 31), tuple(3000 + i for i in range(64))]
)
def test_long_ragged_contexts_on_a_gpu_equal_the_reference(contexts: tuple[int, ...], group: int) -> None:
    from kernels_ref.triton.stream_k import stream_k

    heads = Heads(8, group, 128)
    layout = lay_out([RowSize(context - 1, 1) for context in contexts], 128, DEVICE, heads=heads)
    shape = (layout.num_blocks + 1, 8, 128, 128)
    k, v = (random(shape, torch.bfloat16, DEVICE, seed) for seed in (1, 2))
    q, t = queries(len(contexts), heads, torch.bfloat16, DEVICE), layout.tensors
    blocks = layout.plans[Blocks()]
    out = Partial(*stream_k(q, k, v, t.owner, t.tail_block, blocks.tails.visible, 0.0))
    inputs = inputs_of(q.float(), units=of_stores(k.float(), v.float()), tensors=t)
    exact = reference.unique_blocks(inputs, blocks)
    got, expected = normalise(out, torch.float32), normalise(exact, torch.float32)
    assert (got - expected).abs().max() < 4 * torch.finfo(torch.bfloat16).eps * expected.abs().max()


H200 = DeviceLimits(num_processors=132, shared_bytes=227 << 10)


@pytest.mark.parametrize(("num_rows", "least"), [(1, 16), (2, 4), (32, 4)])
def test_stream_k_runs_once_every_worker_has_blocks_enough(num_rows: int, least: int) -> None:
    needed = least * num_workers(H200) // 8
    assert choose(num_rows, needed, 8, H200) is True
    assert choose(num_rows, needed - 1, 8, H200) is False


@given(
    rows=st.integers(2, 256),
    blocks=st.integers(0, 10_000),
    heads=st.integers(1, 64),
    more=st.integers(0, 500),
)
def test_more_work_never_turns_the_choice_away_from_stream_k(
    rows: int, blocks: int, heads: int, more: int
) -> None:
    if choose(rows, blocks, heads, H200):
        assert choose(rows + more, blocks + more, heads, H200)
