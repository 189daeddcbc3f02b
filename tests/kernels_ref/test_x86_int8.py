"""Products of rows rounded to int8 with int8 codes on x86: exact sums, against integers of 64 bits."""

from __future__ import annotations

import pytest
import torch

from kernels_ref.x86 import int8, library
from kernels_ref.x86.linear import pack_bias
from tests.needs import needs_x86_kernels

pytestmark = [
    needs_x86_kernels,
    pytest.mark.instruction_set,
]

NAMES: list[library.Instructions] = ["best", *library.variants(torch.float32)]
ROWS = [1, 2, 3, 4, 5, 7, 13, 250]


def expected_of(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """The product by integers of 64 bits; scales are multiplied in float32, one after the other."""
    wide = x.float()
    of_rows = wide.abs().amax(dim=-1, keepdim=True).clamp(min=2.0**-100) / 127 if scale is None else scale
    rounded = (wide / of_rows).round().clamp(-128, 127).long()
    return ((rounded @ codes.long().t()).float() * scales * of_rows + bias).to(x.dtype)


def packed(codes: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(int8.packed_shape(*codes.shape), dtype=torch.int8)
    int8.pack(codes, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_static", [False, True])
def test_sums_are_exact_in_any_instructions(is_static: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for num_outputs, num_inputs in ((70, 100), (33, 2080), (290, 64)):
        codes = torch.randint(-128, 128, (num_outputs, num_inputs), generator=generator).to(torch.int8)
        scales = torch.rand(num_outputs, generator=generator) + 0.5
        bias = torch.randn(num_outputs, generator=generator)
        scale = torch.tensor([0.02]) if is_static else None
        layout = packed(codes), pack_bias(scales), int8.pack_sums(codes), pack_bias(bias), num_outputs
        live = torch.tensor([7, 3], dtype=torch.int32)
        for rows in ROWS:
            x = torch.randn(1, rows, num_inputs, generator=generator).to(dtype)
            x[:, -1] = 0
            expected = expected_of(x, codes, scales, bias, scale)
            if rows == 7:
                expected[:, 3:] = 0
            for name in NAMES if rows * num_inputs < 60_000 else NAMES[:-1]:
                got = int8.operator()(x, *layout, scale, live, library.NUMBER_OF[name])
                assert torch.equal(got, expected), (name, rows, num_inputs)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_the_largest_codes_do_not_saturate(name: library.Instructions) -> None:
    for x_code in (127, -128):
        for code in (127, -128):
            codes = torch.full((32, 4096), code, dtype=torch.int8)
            x = torch.full((2, 4096), float(x_code))
            layout = packed(codes), torch.ones(32), int8.pack_sums(codes), None, 32
            got = int8.operator()(x, *layout, torch.ones(1), None, library.NUMBER_OF[name])
            assert torch.equal(got, torch.full((2, 32), float(x_code * code * 4096)))


@pytest.mark.parametrize("rows", [1, 9])
def test_several_weights_of_the_same_rows(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, layers = torch.randn(1, rows, 96, generator=generator), []
    for num_outputs in (40, 64, 20):
        codes = torch.randint(-128, 128, (num_outputs, 96), generator=generator).to(torch.int8)
        scales = pack_bias(torch.rand(num_outputs, generator=generator))
        layers.append((packed(codes), scales, int8.pack_sums(codes), None, num_outputs))
    got = int8.each_operator(3)(x, *(item for each in zip(*layers, strict=True) for item in each), None, None)
    assert all(
        torch.equal(part, int8.operator()(x, *layer, None, None))
        for part, layer in zip(got, layers, strict=True)
    )


@pytest.mark.parametrize("scale", [None, torch.tensor([0.02])])
def test_a_row_with_nan_is_nan(scale: torch.Tensor | None) -> None:
    codes, x = torch.full((40, 64), 3, dtype=torch.int8), torch.ones(3, 64)
    x[1, 5] = torch.nan
    layout = packed(codes), pack_bias(torch.ones(40)), int8.pack_sums(codes), None, 40
    for name in NAMES:
        got = int8.operator()(x, *layout, scale, None, library.NUMBER_OF[name])
        assert got.isnan().any(dim=1).tolist() == [False, True, False]
        assert got[1].isnan().all()
