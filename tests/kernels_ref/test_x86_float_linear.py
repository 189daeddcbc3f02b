"""Packed products of float32 inputs against float64, and each number of lanes against the model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_ref.x86 import library, linear
from tests.needs import needs_x86_kernels

pytestmark = [
    needs_x86_kernels,
    pytest.mark.instruction_set,
]

STORES = (torch.bfloat16, torch.float16, torch.float32)
NAMES = library.variants(torch.float32)


@settings(deadline=None, max_examples=80)
@given(
    data=st.data(),
    store=st.sampled_from(STORES),
    inputs=st.one_of(st.integers(1, 200), st.just(1300)),
    outputs=st.integers(1, 200),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_are_summed_in_float32_with_the_same_bits_in_any_number_of_lanes(
    data: st.DataObject, store: torch.dtype, inputs: int, outputs: int, has_bias: bool, seed: int
) -> None:
    # Rows read the weight where it lies, up to 72, or panels that are widened.
    rows = data.draw(st.one_of(st.integers(0, 40), st.integers(60, 90) if inputs < 200 else st.just(250)))
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=gen)
    weight = (torch.randn(outputs, inputs, generator=gen) * inputs**-0.5).to(store)
    bias = torch.randn(outputs, generator=gen) if has_bias else None
    packed, terms = linear.pack(weight), None if bias is None else linear.pack_bias(bias)
    names = NAMES if rows * inputs < 20_000 else NAMES[:-1]
    found = [linear.multiply(x, packed, terms, outputs, None, name) for name in names]
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    bound = (x.double().abs() @ weight.double().abs().T + 1) * 2.0**-24 * (inputs + 2)
    assert ((found[0].double() - expected).abs() <= bound).all()
    assert all(torch.equal(found[0], other) for other in found[1:])
    if rows:
        assert torch.equal(linear.multiply(x[-1:], packed, terms, outputs, None, names[0]), found[0][-1:])


@pytest.mark.parametrize("rows", [1, 20, 300])
def test_weights_of_several_dtypes_share_inputs_threads_and_padding(rows: int) -> None:
    x = torch.randn(rows, 96)
    weights = [torch.randn(70, 96).to(store) for store in STORES]
    packed, live = (
        [linear.pack(weight) for weight in weights],
        torch.tensor([rows, rows // 2], dtype=torch.int32),
    )
    biases = [None, linear.pack_bias(torch.randn(70)), None]
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outputs.append(linear.each_operator(3)(x, *packed, *biases, *[70] * 3, live))
    finally:
        torch.set_num_threads(before)
    for one, two, panels, bias in zip(*outputs, packed, biases, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one[: rows // 2], linear.multiply(x[: rows // 2], panels, bias, 70))
        assert not one[rows // 2 :].any()


def test_numbers_of_each_dtype_are_widened_exactly() -> None:
    x = torch.ones(1, 1)
    for store in STORES[:2]:
        bits = torch.arange(-(2**15), 2**15).to(torch.int16)
        numbers = bits.view(store)[:, None]
        for name in NAMES:
            y = linear.multiply(x, linear.pack(numbers), None, 2**16, None, name)[0]
            assert torch.equal(y.nan_to_num(nan=1e-3), numbers[:, 0].float().nan_to_num(nan=1e-3))


def test_what_cannot_be_multiplied_is_refused() -> None:
    packed = linear.pack(torch.randn(4, 8).half())
    with pytest.raises(
        ValueError, match="expected best, model, or avx2 or avx512 where the CPU has it, got tiles"
    ):
        linear.multiply(torch.randn(1, 8), packed, None, 4, None, "tiles")
    with pytest.raises(ValueError, match="expected bfloat16 or float32"):
        linear.multiply(torch.randn(1, 8).double(), packed, None, 4)
    with pytest.raises(ValueError, match="expected 16 bits or float32, got Double"):
        linear.multiply(torch.randn(1, 8), packed.double(), None, 4)
    assert linear.fits(torch.randn(4, 8), torch.float32)
    assert not linear.fits(torch.randn(4, 8).double(), torch.float32)
    assert not linear.fits(torch.randn(4, 8).half())
