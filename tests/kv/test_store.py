"""Copies inside the stores, a few at a time, do what they would do one after the other."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.kv.copies import BlockCopy, Copy, RowCopy
from hpu_duo.kv.plan import LayerKV, MemoryPlan
from hpu_duo.kv.store import KVStore, split_copies

NUM_BLOCKS, NUM_ROWS = 5, 3
PLAN = MemoryPlan(
    (LayerKV(2, 1, 4, 3), LayerKV(0, 3, 4, 3), LayerKV(3, 0, 4, 3)),
    dtype_bytes=4,
    block_size=2,
    max_num_seqs=NUM_ROWS,
    num_blocks=NUM_BLOCKS,
)


def copies_of(kind: type[Copy], size: int) -> st.SearchStrategy[Copy]:
    unit = st.integers(0, size - 1)
    return st.builds(kind, unit, unit)


copy_lists = st.lists(
    st.one_of(copies_of(BlockCopy, NUM_BLOCKS), copies_of(RowCopy, NUM_ROWS)), min_size=0, max_size=14
)


def random_store() -> KVStore:
    store = KVStore(PLAN, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    for tensor in tensors(store):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return store


def tensors(store: KVStore) -> list[torch.Tensor]:
    return [tensor for layer in store.layers for units in layer for tensor in (units.k, units.v)]


@given(copy_lists)
def test_copies_at_once_equal_copies_one_by_one(copies: list[Copy]) -> None:
    store, expected = random_store(), random_store()
    store.carry_out(copies)
    for copy in copies:
        for layer in expected.layers:
            units = layer.blocks if isinstance(copy, BlockCopy) else layer.rings
            for tensor in (units.k, units.v):
                if len(tensor):
                    tensor[copy.dst] = tensor[copy.src].clone()
    assert all(got.equal(wanted) for got, wanted in zip(tensors(store), tensors(expected)))


@given(copy_lists)
def test_runs_have_few_sizes_one_kind_and_keep_the_order(copies: list[Copy]) -> None:
    runs = list(split_copies(copies))
    assert [copy for run in runs for copy in run] == copies
    assert {len(run) for run in runs} <= {1, 2, 4, 8}
    assert all(len({type(copy) for copy in run}) == 1 for run in runs)


def test_independent_copies_move_in_as_few_runs_as_their_number_needs() -> None:
    copies = [RowCopy(20 + index, index) for index in range(13)]
    assert [len(run) for run in split_copies(copies)] == [8, 4, 1]


def test_warm_up_touches_nothing_but_trash() -> None:
    store, expected = random_store(), random_store()
    store.warm_up()
    assert all(got.equal(wanted) for got, wanted in zip(tensors(store), tensors(expected)))
