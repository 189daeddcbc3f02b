"""Triton kernels of linear layers of codes, against plain weights of the same codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hpu_duo.modeling.quantised import cuda
from hpu_duo.modeling.quantised.cuda import TritonLinear
from hpu_duo.modeling.quantised.format import Activations
from hpu_duo.modeling.quantised.linear import QuantisedLinear, round_inputs
from hpu_duo.modeling.quantised.rounding import rounded
from hpu_duo.modeling.quantised.weight import QuantisedWeight, pack_nibbles

pytest.importorskip("triton")

N, K = 40, 192
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codes(least: int, most: int, *shape: int) -> torch.Tensor:
    return torch.randint(least, most, shape, generator=torch.Generator().manual_seed(3))


def weights() -> dict[str, QuantisedWeight]:
    """One weight for each encoding: scales of outputs, of groups, of blocks and of all; zero points."""
    plain, shape = normal(N, K), (N, K)
    grouped = rounded(plain, "int4", torch.bfloat16)
    zeros = codes(0, 16, *grouped.scales.shape).to(torch.uint8)
    fp8 = plain.mul(100).to(torch.float8_e4m3fn)
    unsigned = codes(0, 256, N, K).to(torch.uint8)
    nibbles = pack_nibbles(codes(0, 16, N, 33).to(torch.uint8))
    return {
        "int8": rounded(plain, "int8", torch.float32),
        "int4": grouped,
        "int4, zero points": replace(grouped, zeros=zeros),
        "int4, mixed groups": replace(grouped, zeros=zeros).select(1, torch.randperm(K)),
        "int4, odd inputs": QuantisedWeight(nibbles, torch.rand(N, 1), (N, 33), (1, 33), 8, 4),
        "uint8": QuantisedWeight(unsigned, torch.rand(N, 3), shape, (1, 64), 128),
        "fp8": rounded(plain, "fp8", torch.bfloat16),
        "fp8, blocks": QuantisedWeight(fp8, torch.rand(3, 3), shape, (16, 64)),
        "fp8, tensor": QuantisedWeight(fp8, torch.tensor([[0.5]]), shape, (N, K)),
    }


def run(stored: QuantisedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    layer = QuantisedLinear(K, N, None if bias is None else torch.nn.Parameter(bias), stored)
    return TritonLinear(layer).to(DEVICE)(x.to(DEVICE)).cpu()


def expected(stored: QuantisedWeight, x: torch.Tensor) -> torch.Tensor:
    plain = replace(stored, activations=None).dequantised(torch.float32).double()
    return x.double() @ plain.t()


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.detach().double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", weights())
def test_products_are_those_of_plain_weights(name: str) -> None:
    stored = weights()[name]
    assert cuda.fits(stored)
    bias = normal(N, seed=2)
    for shape in ((2, 3), (1, 3), ()):  # with matrix units, and without
        x = normal(*shape, stored.shape[1], seed=1)
        got = run(stored, x, bias)
        assert got.shape == (*shape, N)
        assert error(got, expected(stored, x) + bias.double()) < 1e-6
    halves = x.bfloat16()
    # The interpreter cuts results to bfloat16.
    assert error(run(stored, halves), expected(stored, halves)) < 2**-7


@pytest.mark.parametrize("name", ["int8", "int4, zero points", "int4, odd inputs", "fp8, blocks"])
def test_many_rows_meet_a_weight_that_is_decoded_once(name: str) -> None:
    stored = weights()[name]
    x = normal(70, stored.shape[1], seed=1)
    assert error(run(stored, x), expected(stored, x)) < 1e-6


ROUNDED = {
    "int8 tokens": ("int8", Activations("int8"), None),
    "int8 tensor": ("int8", Activations("int8", is_static=True), 0.02),
    "fp8 tokens": ("fp8", Activations("fp8"), None),
    "fp8 tensor": ("fp8, tensor", Activations("fp8", is_static=True), 0.005),
    "fp8 groups": ("fp8, blocks", Activations("fp8", group=64), None),
    "fp8 groups that cross": ("fp8, blocks", Activations("fp8", group=96), None),
    "fp8 constant": ("fp8", None, 0.005),
}


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("num_rows", [3, 9, 130])
def test_rounded_inputs_are_multiplied_as_codes(name: str, num_rows: int) -> None:
    of, activations, scale = ROUNDED[name]
    stored = replace(weights()[of], activations=activations, input_scale=scale)
    assert cuda.rounds_inputs(stored)
    x = normal(num_rows, K, seed=1)
    x[0] *= 1000  # is clipped by a constant
    x[1] = 0
    given = None if scale is None else torch.tensor(scale)
    seen = round_inputs(x, activations or Activations("fp8"), given)
    # Products of 8-bit floats are summed with 14 bits on a GPU.
    assert error(run(stored, x), expected(stored, seen)) < (1e-3 if DEVICE.type == "cuda" else 1e-6)


def test_an_input_that_is_not_finite_spoils_its_own_row_only() -> None:
    for of, activations, scale in ROUNDED.values():
        stored = replace(weights()[of], activations=activations, input_scale=scale)
        x = normal(3, K, seed=1)
        x[0], x[2, 7] = torch.nan, torch.inf
        got = run(stored, x)
        assert got[0].isnan().all()
        assert got[1].isfinite().all()
        assert got[2].isfinite().all() if scale is not None else got[2].isnan().all()


def test_tables_keep_their_types_when_a_model_changes_its_own() -> None:
    stored = weights()["fp8, blocks"]
    layer = TritonLinear(QuantisedLinear(K, N, torch.nn.Parameter(torch.ones(N)), stored)).bfloat16()
    assert torch.equal(layer.scales, stored.scales)
    assert layer.bias is not None
    assert layer.bias.dtype == torch.bfloat16


def test_inputs_that_no_kernel_rounds() -> None:
    found = weights()
    assert not cuda.rounds_inputs(replace(found["int4"], activations=Activations("int8")))
    assert not cuda.rounds_inputs(replace(found["uint8"], activations=Activations("int8")))
    assert not cuda.rounds_inputs(replace(found["int8"], activations=Activations("fp8")))
    assert not cuda.rounds_inputs(replace(found["fp8"], activations=Activations("fp8", group=48)))
    narrow = replace(found["fp8"], input_scale=0.1, largest=240.0)
    assert not cuda.fits(narrow), "codes of a Gaudi 2"
    assert not cuda.fits(found["int4"].select(1, torch.arange(0, K, 3))), "groups of other sizes"
