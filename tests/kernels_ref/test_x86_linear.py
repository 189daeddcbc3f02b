"""Packed products against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_ref.x86 import linear
from kernels_ref.x86.library import is_supported

here = pytest.mark.skipif(not is_supported(), reason="needs a CPU with AVX512-BF16")


@here
@settings(deadline=None, max_examples=80)
@given(
    rows=st.one_of(st.integers(0, 20), st.integers(230, 500)),
    outputs=st.integers(1, 200),
    pairs=st.one_of(st.integers(1, 100), st.just(1200)),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_are_summed_in_float32_and_rounded_once(
    rows: int, outputs: int, pairs: int, has_bias: bool, seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2 * pairs, generator=gen).bfloat16()
    weight = (torch.randn(outputs, 2 * pairs, generator=gen) * pairs**-0.5).bfloat16()
    bias = torch.randn(outputs, generator=gen).bfloat16() if has_bias else None
    packed_bias = None if bias is None else linear.pack_bias(bias)
    out = linear.multiply(x, linear.pack(weight), packed_bias, outputs)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-4)


@here
def test_inputs_keep_their_leading_dimensions_and_may_be_strided() -> None:
    x = torch.randn(3, 5, 8).bfloat16().transpose(0, 1)
    weight = torch.randn(7, 8).bfloat16()
    out = linear.multiply(x, linear.pack(weight), None, 7)
    assert out.shape == (5, 3, 7)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight), rtol=2e-2, atol=2e-2)


@here
def test_several_threads_give_the_bits_of_one() -> None:
    x, packed = torch.randn(500, 64).bfloat16(), linear.pack(torch.randn(300, 64).bfloat16())
    before = torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outputs.append(linear.multiply(x, packed, None, 300))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outputs)


@here
def test_what_cannot_be_multiplied_is_refused() -> None:
    packed = linear.pack(torch.randn(4, 8).bfloat16())
    with pytest.raises(ValueError, match=r"expected bfloat16 \[\.\.\., 8\], got BFloat16 \[1, 6\]"):
        linear.multiply(torch.randn(1, 6).bfloat16(), packed, None, 4)
    with pytest.raises(ValueError, match="got Float"):
        linear.multiply(torch.randn(1, 8), packed, None, 4)
    x = torch.randn(1, 8).bfloat16()
    with pytest.raises(ValueError, match="expected 65 outputs and a packed bias, got a weight of 64"):
        linear.multiply(x, packed, None, 65)
    with pytest.raises(ValueError, match="expected 4 outputs and a packed bias"):
        linear.multiply(x, packed, torch.zeros(4), 4)
    with pytest.raises(ValueError, match="expected Float, got BFloat16"):
        linear.multiply(x, packed, torch.zeros(64).bfloat16(), 4)
    with pytest.raises(ValueError, match="expected Int, got Long"):
        linear.multiply(x, packed, None, 4, torch.tensor([1, 1]))
    assert linear.fits(torch.randn(4, 7).bfloat16()) is False
    assert linear.fits(torch.randn(4, 8)) is False


@here
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 300), live=st.integers(0, 300), padded=st.integers(0, 300), is_padded=st.booleans()
)
def test_rows_of_padding_are_zero_and_the_others_as_without_padding(
    rows: int, live: int, padded: int, is_padded: bool
) -> None:
    live = min(live, rows)
    padded = rows if is_padded else padded
    x, weight = torch.randn(rows, 64).bfloat16(), linear.pack(torch.randn(70, 64).bfloat16())
    x[live if padded == rows else rows :] = torch.nan
    out = linear.multiply(x, weight, None, 70, torch.tensor([padded, live], dtype=torch.int32))
    counted = live if padded == rows else rows
    assert torch.equal(out[:counted], linear.multiply(x[:counted], weight, None, 70))
    assert not out[counted:].any()


@here
def test_a_weight_may_be_packed_into_memory_that_is_given() -> None:
    weight = torch.randn(70, 64).bfloat16()
    out = torch.full(linear.packed_shape(70, 64), torch.nan, dtype=torch.bfloat16)
    assert linear.pack(weight, out) is out
    assert torch.equal(out, linear.pack(weight))
