"""Products of rows with codes on x86, against dequantised weights in float64."""

from __future__ import annotations

import math

import pytest
import torch

from hpu_duo.modeling.packed_linear import HugePages
from hpu_duo.modeling.quantised.linear import QuantisedLinear
from hpu_duo.modeling.quantised.panels import PanelQuantisedLinear, fits
from hpu_duo.modeling.quantised.weight import QuantisedWeight, pack_nibbles
from kernels_ref.x86 import library
from kernels_ref.x86.quantised import each_operator, operator
from tests.needs import needs_x86_kernels

pytestmark = [
    needs_x86_kernels,
    pytest.mark.instruction_set,
]

ROWS = [1, 2, 3, 4, 5, 7, 16, 22, 250]
DTYPES = [torch.float32, *((torch.bfloat16,) if library.is_supported() else ())]
"""Of activations; a wider one is more exact."""
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
BLOCK = 256
"""Most neighbouring inputs of float32 that are rounded to 16 bits by one scale, for integer codes."""


def drawn(kind: str, shape: tuple[int, int], block: tuple[int, int], scales: torch.dtype) -> QuantisedWeight:
    """Codes of all values, and zero points where the kind has "zeros"."""
    generator = torch.Generator().manual_seed(0)
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    bits, least, most = {"4": (4, 0, 16), "8": (8, -128, 128), "u": (8, 0, 256), "f": (8, 0, 256)}[kind[0]]
    codes = torch.randint(least, most, shape, generator=generator)
    dtype = torch.int8 if kind[0] == "8" else torch.uint8
    zeros: torch.Tensor | int = {"4": 8, "u": 128}.get(kind[0], 0)
    if "zeros" in kind:
        zeros = torch.randint(least, most, grid, generator=generator).to(dtype)
    codes = codes.to(dtype)
    if kind[0] == "f":
        codes = torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn)  # no NaN
    scale = (torch.rand(grid, generator=generator) + 0.5).to(scales)
    return QuantisedWeight(pack_nibbles(codes) if bits == 4 else codes, scale, shape, block, zeros, bits)


CASES = {
    "int8 by output": ("8", (70, 96), (1, 96), torch.bfloat16),
    "int8 with zero points": ("8 zeros", (64, 80), (1, 80), torch.float32),
    "int8 of a tensor": ("8", (33, 544), (33, 544), torch.float32),
    "unsigned groups": ("u zeros", (96, 1088), (1, 64), torch.float16),
    "groups of many outputs": ("8 zeros", (530, 1088), (1, 64), torch.bfloat16),
    "fp8 by output": ("f", (290, 160), (1, 160), torch.float32),
    "fp8 blocks": ("f", (150, 200), (128, 128), torch.float32),
    "int4 groups": ("4", (96, 1280), (1, 128), torch.bfloat16),
    "int4 groups with zero points": ("4 zeros", (40, 640), (1, 32), torch.float16),
    "int4 by output": ("4 zeros", (64, 77), (1, 77), torch.float32),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_dequantised_weights(name: str, dtype: torch.dtype) -> None:
    stored = drawn(*CASES[name])
    assert fits(stored, dtype)
    check(stored, dtype)


def check(stored: QuantisedWeight, dtype: torch.dtype) -> None:
    num_outputs, num_inputs = stored.shape
    generator = torch.Generator().manual_seed(1)
    bias = torch.nn.Parameter(torch.randn(num_outputs, generator=generator).to(dtype))
    layer = QuantisedLinear(num_inputs, num_outputs, bias, stored)
    live = torch.tensor([7, 3], dtype=torch.int32)
    memory = HugePages(HugePages.rounded(PanelQuantisedLinear.num_bytes(layer)))
    packed = PanelQuantisedLinear(layer, memory, live)
    weight = layer.dequantised(torch.float32).double()
    for rows in ROWS:
        x = torch.randn(1, rows, num_inputs, generator=generator).to(dtype)
        with torch.inference_mode():
            got = packed(x)
        expected = x.double() @ weight.t() + bias.double()
        if rows == 7:
            expected[:, 3:] = 0
        # The sum is rounded once; it is of float32 numbers as large as the products.
        size = x.double().abs() @ weight.abs().t()
        bound = expected.abs() * UNITS[dtype] + size * 2**-18
        if dtype == torch.float32 and stored.label[:3] != "fp8":
            bound += rounding(packed, x, weight)
        assert bool(((got.double() - expected).abs() <= bound).all()), rows
        if dtype == torch.float32 and rows <= 22:
            check_lanes(packed, x, got)


def rounding(packed: PanelQuantisedLinear, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the error of products whose inputs are off by 2^-16 of the largest one beside them."""
    if packed.order is not None:
        x, weight = x[..., packed.order], weight[:, packed.order]
    block = math.gcd(BLOCK, packed.group) if packed.scales.shape[1] > 1 else BLOCK
    total = x.new_zeros(*x.shape[:-1], weight.shape[0], dtype=torch.float64)
    for some, columns in zip(x.double().split(block, -1), weight.split(block, 1), strict=True):
        total += some.abs().amax(-1, keepdim=True) * 2**-16 * columns.abs().sum(1)
    return total


def check_lanes(packed: PanelQuantisedLinear, x: torch.Tensor, expected: torch.Tensor) -> None:
    """Every number of lanes, and the model, have the same bits."""
    order = slice(None) if packed.order is None else packed.order
    layout = packed.codes, packed.scales, packed.zeros, packed.bias, packed.out_features, packed.group
    for name in library.variants(torch.float32):
        assert torch.equal(
            operator()(x[..., order], *layout, packed.live, library.NUMBER_OF[name]), expected
        ), name


FP8 = [name for name in CASES if name.startswith("fp8")]
INTEGERS = [name for name in CASES if name not in FP8]


def made(name: str) -> PanelQuantisedLinear:
    """A layer without a bias."""
    kind, (num_outputs, num_inputs), block, scales = CASES[name]
    layer = QuantisedLinear(
        num_inputs, num_outputs, None, drawn(kind, (num_outputs, num_inputs), block, scales)
    )
    memory = HugePages(HugePages.rounded(PanelQuantisedLinear.num_bytes(layer)))
    return PanelQuantisedLinear(layer, memory, None)


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    layer = made(name)
    x = torch.randn(1, 250, layer.in_features, generator=torch.Generator().manual_seed(3))
    whole = layer(x)
    for count in (1, 4, 6, 8, 9, 16, 22):
        assert torch.equal(layer(x[:, :count]), whole[:, :count]), count


@pytest.mark.parametrize("name", INTEGERS)
def test_inputs_of_any_size_are_rounded_by_the_largest_beside_them(name: str) -> None:
    layer = made(name)
    weight = drawn(*CASES[name]).dequantised(torch.float32).double()
    x = torch.randn(1, 12, layer.in_features, generator=torch.Generator().manual_seed(4))
    # Zeros, denormals, and some as large as their products can be; one that is far larger than others.
    sizes = torch.tensor([0.0, 1e-42, 1e-36, 1e-20, 1.0, 1e20, 1e30])
    x[0, :7] *= sizes[:, None]
    x[0, 7, 40] = 1e4
    x[0, 8, :32] = 0
    x[0, 9] = 32767.5
    got, expected = layer(x), x.double() @ weight.t()
    least = torch.full_like(x, 2.0**-100)  # smaller inputs are rounded as if one of this size were there
    bound = rounding(layer, x.abs().maximum(least), weight) + (x.double().abs() @ weight.abs().t()) * 2**-18
    assert bool(((got.double() - expected).abs() <= bound).all())
    assert not got[0, 0].any(), "a row of zeros"


@pytest.mark.parametrize("rows", [7, 20])
@pytest.mark.parametrize("name", FP8)
def test_inputs_of_fp8_codes_may_have_any_size(name: str, rows: int) -> None:
    layer = made(name)
    weight = drawn(*CASES[name]).dequantised(torch.float32).double()
    x = torch.randn(1, rows, layer.in_features, generator=torch.Generator().manual_seed(4))
    x[0, :6] *= torch.tensor([0.0, 1e-42, 1e-36, 1e-20, 1e20, 1e32])[:, None]
    x[0, 6, 40:] *= 1e-30  # beside others that are far larger
    got, expected = layer(x), x.double() @ weight.t()
    least = 2.0**-147  # a step of the smallest numbers of float32, some times
    bound = expected.abs() * UNITS[torch.float32] + (x.double().abs() @ weight.abs().t()) * 2**-18 + least
    assert bool(((got.double() - expected).abs() <= bound).all())
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["int8 by output", "int4 groups with zero points", "fp8 by output"])
def test_an_input_that_is_no_number_stays_in_its_row(name: str, value: float, rows: int) -> None:
    layer = made(name)
    weight = drawn(*CASES[name]).dequantised(torch.float32)
    x = torch.randn(1, rows, layer.in_features, generator=torch.Generator().manual_seed(5))
    before = layer(x)
    x[0, 0, 37] = value
    got = layer(x)
    assert torch.equal(got[0, 1:], before[0, 1:])
    assert torch.equal(got[0, 0].nan_to_num(7.0), (value * weight[:, 37]).nan_to_num(7.0))
    assert not got[0, 0].isfinite().any()


def test_inputs_whose_groups_are_no_neighbours() -> None:
    stored = drawn("4 zeros", (64, 256), (1, 32), torch.bfloat16)
    mixed = stored.select(1, torch.randperm(256, generator=torch.Generator().manual_seed(0)))
    assert mixed.group_of is not None
    check(mixed, torch.float32)
    assert not fits(mixed.select(1, torch.arange(100)), torch.float32), "groups of several sizes"


@pytest.mark.parametrize("rows", [1, 9])
def test_several_weights_of_the_same_rows(rows: int) -> None:
    layers = []
    for name in ("int8 with zero points", "unsigned groups", "int4 groups with zero points"):
        kind, (num_outputs, _), _, scales = CASES[name]
        stored = drawn(kind, (num_outputs + 8, 640), (1, 64), scales)
        layer = QuantisedLinear(640, num_outputs + 8, None, stored)
        memory = HugePages(HugePages.rounded(PanelQuantisedLinear.num_bytes(layer)))
        layers.append(PanelQuantisedLinear(layer, memory, None))
    x = torch.randn(1, rows, 640, generator=torch.Generator().manual_seed(2)).to(DTYPES[-1])
    lists = zip(
        *((each.codes, each.scales, each.zeros, None, each.out_features, each.group) for each in layers)
    )
    got = each_operator(3)(x, *(item for each in lists for item in each), None)
    assert all(torch.equal(part, layer(x)) for part, layer in zip(got, layers, strict=True))
