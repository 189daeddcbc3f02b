"""Packed products against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_ref.x86 import linear
from kernels_ref.x86.library import Instructions, has_tiles, is_supported, variants

here = pytest.mark.skipif(not is_supported(), reason="needs a CPU with AVX512-BF16")
each = pytest.mark.parametrize("instructions", variants())


def draw_inputs(rows: int, outputs: int, inputs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=gen) * (inputs / 2) ** -0.5
    return torch.randn(rows, inputs, generator=gen).bfloat16(), weight.bfloat16()


@here
@each
@settings(deadline=None, max_examples=60)
@given(data=st.data(), outputs=st.integers(1, 200), has_bias=st.booleans(), seed=st.integers(0, 99))
def test_products_are_summed_in_float32_and_rounded_once(
    data: st.DataObject, instructions: Instructions, outputs: int, has_bias: bool, seed: int
) -> None:
    is_slow = instructions == "model"
    rows = data.draw(st.one_of(st.integers(0, 40), st.integers(0, 40) if is_slow else st.integers(230, 600)))
    inputs = data.draw(st.one_of(st.integers(1, 200), st.just(100 if is_slow else 2500)))
    x, weight = draw_inputs(rows, outputs, inputs, seed)
    bias = torch.randn(outputs).bfloat16() if has_bias else None
    packed_bias = None if bias is None else linear.pack_bias(bias)
    out = linear.multiply(x, linear.pack(weight), packed_bias, outputs, None, instructions)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-4)


@here
@pytest.mark.parametrize("instructions", [name for name in variants() if name != "model"])
def test_inputs_that_are_summed_in_parts_give_the_bits_of_a_row_with_all_of_them(
    instructions: Instructions,
) -> None:
    x, weight = draw_inputs(40, 40, 2**19 // 40 + 100, 0)
    packed = linear.pack(weight)
    whole = torch.cat([linear.multiply(row, packed, None, 40, None, instructions) for row in x.split(1)])
    assert torch.equal(linear.multiply(x, packed, None, 40, None, instructions), whole)


@here
@settings(deadline=None, max_examples=30)
@given(inputs=st.integers(1000, 3000), outputs=st.integers(1, 200), rows=st.integers(1, 64))
def test_few_rows_read_the_weight_in_parts_and_give_the_bits_of_many_rows(
    inputs: int, outputs: int, rows: int
) -> None:
    x, weight = draw_inputs(65, outputs, inputs, rows)
    packed = linear.pack(weight)
    whole = linear.multiply(x, packed, None, outputs, None, "vectors")
    assert torch.equal(linear.multiply(x[:rows], packed, None, outputs, None, "vectors"), whole[:rows])


@here
@each
@settings(deadline=None, max_examples=40)
@given(data=st.data(), seed=st.integers(0, 99), num_threads=st.integers(1, 3))
def test_products_with_several_weights_are_those_with_each(
    data: st.DataObject, instructions: Instructions, seed: int, num_threads: int
) -> None:
    is_slow = instructions == "model"
    rows = data.draw(st.one_of(st.integers(0, 40), st.just(50) if is_slow else st.integers(200, 500)))
    inputs = data.draw(st.one_of(st.integers(1, 200), st.just(100 if is_slow else 2500)))
    sizes = data.draw(st.lists(st.integers(1, 150), min_size=2, max_size=4))
    live = data.draw(st.one_of(st.none(), st.integers(0, rows)))
    x, _ = draw_inputs(rows, 1, inputs, seed)
    packed = [linear.pack(draw_inputs(0, outputs, inputs, number)[1]) for number, outputs in enumerate(sizes)]
    biases = [linear.pack_bias(torch.randn(outputs)) if outputs % 2 else None for outputs in sizes]
    counts = None if live is None else torch.tensor([rows, live], dtype=torch.int32)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        got = linear.each_operator(len(sizes))(
            x, *packed, *biases, *sizes, counts, linear.NUMBER_OF[instructions]
        )
    finally:
        torch.set_num_threads(before)
    for result, weight, bias, size in zip(got, packed, biases, sizes, strict=True):
        assert torch.equal(result, linear.multiply(x, weight, bias, size, counts, instructions))


@here
def test_weights_of_other_inputs_are_refused() -> None:
    x = torch.randn(2, 64).bfloat16()
    packed = [linear.pack(torch.randn(70, inputs).bfloat16()) for inputs in (64, 96)]
    with pytest.raises(ValueError, match="expected weights of 64 packed inputs, got one of 96"):
        linear.each_operator(2)(x, *packed, None, None, 70, 70, None)


@pytest.mark.skipif(not has_tiles(), reason="needs a CPU with AMX")
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 200),
    exponent=st.sampled_from([0, -60, -110, 60]),
    seed=st.integers(0, 99),
)
def test_tiles_give_the_bits_of_their_model(
    rows: int, outputs: int, inputs: int, exponent: int, seed: int
) -> None:
    x, weight = draw_inputs(rows, outputs, inputs, seed)
    x, packed = x * 2.0**exponent, linear.pack(weight * 2.0 ** (exponent // 2))
    tiles, model = (linear.multiply(x, packed, None, outputs, None, name) for name in ("tiles", "model"))
    assert torch.equal(tiles, model)


@here
def test_the_best_instructions_are_vectors_for_one_row_and_tiles_for_more() -> None:
    x, weight = draw_inputs(40, 50, 700, 1)
    packed = linear.pack(weight)
    for rows in (1, 2, 40):
        name: Instructions = "tiles" if rows > 1 and has_tiles() else "vectors"
        best, chosen = (linear.multiply(x[:rows], packed, None, 50, None, each) for each in ("best", name))
        assert torch.equal(best, chosen)


@here
def test_inputs_keep_their_leading_dimensions_and_may_be_strided() -> None:
    x = torch.randn(3, 5, 8).bfloat16().transpose(0, 1)
    weight = torch.randn(7, 8).bfloat16()
    out = linear.multiply(x, linear.pack(weight), None, 7)
    assert out.shape == (5, 3, 7)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight), rtol=2e-2, atol=2e-2)


@here
@each
def test_several_threads_give_the_bits_of_one(instructions: Instructions) -> None:
    x, packed = torch.randn(500, 64).bfloat16(), linear.pack(torch.randn(300, 64).bfloat16())
    before = torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outputs.append(linear.multiply(x, packed, None, 300, None, instructions))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outputs)


@here
def test_what_cannot_be_multiplied_is_refused() -> None:
    packed = linear.pack(torch.randn(4, 8).bfloat16())
    with pytest.raises(
        ValueError, match=r"expected bfloat16 or float32 \[\.\.\., 1 to 32\], got BFloat16 \[1, 33\]"
    ):
        linear.multiply(torch.randn(1, 33).bfloat16(), packed, None, 4)
    with pytest.raises(ValueError, match="got Half"):
        linear.multiply(torch.randn(1, 8).half(), packed, None, 4)
    x = torch.randn(1, 8).bfloat16()
    with pytest.raises(ValueError, match="expected 33 outputs and a packed bias, got a weight of 32"):
        linear.multiply(x, packed, None, 33)
    with pytest.raises(ValueError, match="expected 4 outputs and a packed bias"):
        linear.multiply(x, packed, torch.zeros(4), 4)
    with pytest.raises(ValueError, match="expected Float, got BFloat16"):
        linear.multiply(x, packed, torch.zeros(32).bfloat16(), 4)
    with pytest.raises(ValueError, match="expected Int, got Long"):
        linear.multiply(x, packed, None, 4, torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="expected best, vectors, tiles or model, got avx2"):
        linear.multiply(x, packed, None, 4, None, "avx2")
    if not has_tiles():
        with pytest.raises(ValueError, match="expected a CPU and a system with AMX"):
            linear.multiply(x, packed, None, 4, None, "tiles")
    assert linear.fits(torch.randn(4, 8).double()) is False


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


@here
def test_a_weight_may_lie_anywhere_in_its_storage() -> None:
    weight = torch.randn(64, 64).bfloat16()
    shifted = torch.cat([weight.flatten()[:1], weight.flatten()])[1:].view(64, 64)
    turned = torch.cat([weight.flatten()[:1], weight.T.flatten()])[1:].view(64, 64).T
    for other in (shifted, weight.T.contiguous().T, turned):
        assert torch.equal(linear.pack(other), linear.pack(weight))
