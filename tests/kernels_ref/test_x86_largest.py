"""Places of largest items against torch's argmax."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_ref.x86 import library as x86

pytestmark = pytest.mark.skipif(not x86.is_supported(), reason="needs a CPU with AVX512-BF16")


@settings(deadline=None, max_examples=150)
@given(
    num_rows=st.integers(0, 5),
    width=st.one_of(st.integers(1, 100), st.integers(1000, 5000)),
    num_values=st.sampled_from([1, 2, 300]),
    special=st.sampled_from([None, math.nan, math.inf, -math.inf, -0.0]),
    seed=st.integers(0, 99),
)
def test_places_are_those_of_argmax(
    num_rows: int, width: int, num_values: int, special: float | None, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    # Few values, so that many are equal.
    rows = torch.randint(-num_values, num_values, (num_rows, width), generator=draw).bfloat16() / 8
    if special is not None:
        rows[torch.rand(rows.shape, generator=draw) < 3 / width] = special
    assert torch.equal(x86.place_of_largest(rows), rows.argmax(dim=-1).int())


def test_rows_below_every_number_have_their_first_place() -> None:
    rows = torch.full((2, 3000), -math.inf).bfloat16()
    assert x86.place_of_largest(rows).tolist() == [0, 0]


def test_rows_may_be_strided_and_threads_share_them() -> None:
    rows = torch.randn(3001, 40).bfloat16().T
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        got = x86.place_of_largest(rows)
    finally:
        torch.set_num_threads(before)
    # Of equal items the first one, which argmax of strided rows may not give.
    assert torch.equal(got, rows.contiguous().argmax(dim=-1).int())


def test_what_has_no_largest_item_is_refused() -> None:
    for rows in (torch.empty(3, 0).bfloat16(), torch.empty(3).bfloat16()):
        with pytest.raises(ValueError, match=r"expected rows \[N, V\] of at least one item, got \[3"):
            x86.place_of_largest(rows)
    with pytest.raises(ValueError, match="expected BFloat16, got Half"):
        x86.place_of_largest(torch.zeros(2, 5).half())
    assert not x86.fits_logits(torch.zeros(2, 5).half())
