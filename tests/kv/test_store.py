"""Copies inside the stores, all at once, do what they would do one after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.kv.pool import BlockCopy, BlockSwap, Copy, CopyLists, RowCopy, copy_sizes, padded_size
from hpu_duo.kv.store import KVStore
from kernels_ref import Owner
from tests.kv.layers import layer_kv

NUM_BLOCKS, NUM_ROWS = 5, 3
PLAN = MemoryPlan(
    (layer_kv(2, 1, 4, 3), layer_kv(0, 3, 4, 3), layer_kv(3, 0, 4, 3)),
    dtype_bytes=4,
    block_size=2,
    max_num_seqs=NUM_ROWS,
    num_blocks=NUM_BLOCKS,
)


def copies_of(kind: type[Copy], size: int) -> st.SearchStrategy[Copy]:
    unit = st.integers(0, size - 1)
    return st.builds(kind, unit, unit)


copy_lists = st.lists(
    st.one_of(
        copies_of(BlockCopy, NUM_BLOCKS), copies_of(BlockSwap, NUM_BLOCKS), copies_of(RowCopy, NUM_ROWS)
    ),
    min_size=0,
    max_size=14,
)


def random_store() -> KVStore:
    store = KVStore(PLAN, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    for tensor in tensors(store):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return store


def test_a_store_takes_the_bytes_of_its_plan() -> None:
    plan = replace(PLAN, max_chunk_rows=2)
    store = KVStore(plan, torch.float32, torch.device("cpu"))
    assert store.num_bytes == plan.total_bytes == PLAN.total_bytes + PLAN.scratch_bytes
    # Keys and values of 4 streaming heads of 4 elements, 3 + 4 slots a ring.
    slots = sum(
        group.kind.num_slots(2) * group.num_heads
        for each in PLAN.layers
        for group in each.groups[-1:]
        if group.kind.keeps_scratch
    )
    assert PLAN.scratch_bytes == slots * 2 * 4 * 4


def tensors(store: KVStore) -> list[torch.Tensor]:
    return [tensor for layer in store.layers for units in layer for tensor in units.views]


@given(copy_lists, st.integers(0, 3))
def test_copies_at_once_equal_copies_one_by_one(copies: list[Copy], num_padding: int) -> None:
    store, expected = random_store(), random_store()
    lists = CopyLists.of(copies)
    for kind, null in ((lists.blocks, NUM_BLOCKS), (lists.rows, NUM_ROWS)):
        assert kind.dtype == np.int32
        assert len(set(kind[1].tolist())) == kind.shape[1] <= null
    padded = (
        np.pad(kind, ((0, 0), (0, num_padding)), constant_values=null)
        for kind, null in ((lists.blocks, NUM_BLOCKS), (lists.rows, NUM_ROWS))
    )
    store.carry_out(*map(torch.from_numpy, padded))
    for copy in copies:
        owner = Owner.ROW if isinstance(copy, RowCopy) else Owner.BLOCK
        for layer, cache in zip(PLAN.layers, expected.layers):
            for group, units in zip(layer.groups, cache):
                for tensor in units.views if group.kind.owner is owner else ():
                    if isinstance(copy, BlockSwap):
                        tensor[[copy.one, copy.other]] = tensor[[copy.other, copy.one]]
                    else:
                        tensor[copy.dst] = tensor[copy.src].clone()
    assert all(got.equal(wanted) for got, wanted in zip(tensors(store), tensors(expected)))


def test_a_swap_by_a_third_row_is_two_copies_at_once_and_that_row() -> None:
    lists = CopyLists.of([RowCopy(0, 2), RowCopy(1, 0), RowCopy(2, 1)])
    assert sorted(lists.rows.T.tolist()) == [[0, 1], [0, 2], [1, 0]]
    assert not lists.blocks.size


@pytest.mark.parametrize(("most", "sizes"), [(1, (1,)), (4, (1, 4)), (6, (1, 4, 6)), (64, (1, 4, 16, 64))])
def test_lists_are_padded_to_few_sizes(most: int, sizes: tuple[int, ...]) -> None:
    assert copy_sizes(most) == sizes
    assert padded_size(0, most) == 0
    for num in range(1, most + 1):
        assert num <= padded_size(num, most) < 4 * num
        assert padded_size(num, most) in sizes


def test_more_copies_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at most 4 copies of one kind in a step, got 5"):
        padded_size(5, 4)
