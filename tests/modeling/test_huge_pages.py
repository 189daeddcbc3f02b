"""Pieces of one range of memory."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.modeling.packed_linear import HugePages

DTYPES = (torch.bfloat16, torch.float32, torch.int8)
pieces = st.lists(
    st.tuples(st.lists(st.integers(1, 9), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=6
)


@given(pieces)
def test_pieces_are_zero_aligned_and_apart(wanted: list[tuple[list[int], torch.dtype]]) -> None:
    sizes = [HugePages.rounded(torch.Size(shape).numel() * dtype.itemsize) for shape, dtype in wanted]
    memory = HugePages(sum(sizes))
    taken = [memory.take(tuple(shape), dtype) for shape, dtype in wanted]
    for number, (piece, (shape, dtype)) in enumerate(zip(taken, wanted), 1):
        assert piece.shape == tuple(shape)
        assert piece.dtype == dtype
        assert piece.data_ptr() % 64 == 0
        assert not piece.any()
        piece.fill_(number)
    for number, piece in enumerate(taken, 1):
        assert (piece == number).all()


def test_a_piece_outlives_the_range_it_was_taken_from() -> None:
    piece = HugePages(1 << 22).take((1 << 21,), torch.bfloat16).fill_(3)
    gc.collect()
    assert (piece == 3).all()


def test_taking_more_than_is_left_is_refused() -> None:
    memory = HugePages(128)
    memory.take((30,), torch.float32)
    with pytest.raises(ValueError, match="at most 0 bytes, got 64"):
        memory.take((1,), torch.int8)


def test_a_range_that_the_system_refuses_is_named_by_its_size() -> None:
    with pytest.raises(MemoryError, match="room for 4,611,686,018,427,387,904 bytes of packed weights"):
        HugePages(1 << 62)
