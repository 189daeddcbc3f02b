"""Layers of codes by the operators of Gaudi's software, on the simulated device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpu_duo.lab.sim.device import take
from hpu_duo.lab.sim.fused import named
from hpu_duo.modeling.quantised.format import Activations
from hpu_duo.modeling.quantised.hpu import KERNEL, HPUFp8Linear, HPUInt4Linear, fits
from hpu_duo.modeling.quantised.linear import QuantisedLinear
from hpu_duo.modeling.quantised.rounding import rounded
from hpu_duo.modeling.quantised.weight import QuantisedWeight
from tests.modeling.families import make_config, save_random
from tests.quantised.test_checkpoints import SIZES, load, tokens
from tests.tiers import further

ON_HPU = {"device": "hpu-sim", "attention": "reference", "dtype": "bfloat16"}


def weight(name: str, num_outputs: int = 48, num_inputs: int = 128) -> QuantisedWeight:
    values = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(0))
    return rounded(values, name, torch.bfloat16)


@pytest.mark.parametrize("device", ["GAUDI2", "GAUDI3"])
def test_products_are_those_of_dequantised_weights(device: str) -> None:
    place = take()
    x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    with named(device):
        for name, kind, bound in (("int4", HPUInt4Linear, 2**-8), ("fp8", HPUFp8Linear, 2**-4)):
            layer = QuantisedLinear(128, 48, torch.nn.Parameter(torch.ones(48).bfloat16()), weight(name))
            assert fits(layer.stored, place)
            expected = x.double() @ layer.dequantised(torch.float32).double().t() + 1
            # 448 is beyond the numbers of a Gaudi 2, whose operator refuses it.
            got = kind(layer, is_narrow=device == "GAUDI2")(x).double()
            assert float((got - expected).norm() / expected.norm()) < bound, name


def test_what_no_operator_reads_does_not_fit() -> None:
    place = take()
    assert not fits(weight("int8"), place)
    assert not fits(weight("int4", num_outputs=20), place), "outputs in no whole words"
    mixed = weight("int4", num_inputs=256).select(1, torch.randperm(256))
    assert not fits(mixed, place), "groups that are no neighbours"
    rounding = replace(weight("int4"), activations=Activations("fp8"))
    assert not fits(rounding, place), "the operator of 4 bits leaves inputs as they are"
    codes = torch.zeros(256, 128).to(torch.float8_e4m3fn)
    blocks = QuantisedWeight(codes, torch.ones(2, 1), (256, 128), (128, 128))
    assert not fits(blocks, place), "scales of blocks, of which one has all inputs"


@pytest.mark.usefixtures("default_buckets")
@pytest.mark.parametrize(("name", "layers"), [("int4", 12), *further(("fp8", 14), ("int8", 0))])
def test_codes_are_read_by_operators_on_the_simulated_device(name: str, layers: int, tmp_path: Path) -> None:
    save_random(make_config("LlamaConfig", **{**SIZES, "hidden_size": 128}), tmp_path)
    served = load(tmp_path, quantization=name, **ON_HPU)
    found = served.stats().resolved.weights
    assert found == (f"{name} ({KERNEL}) in {layers} layers" if layers else "plain")
    got = tokens(served)
    if name != "fp8":  # inputs are rounded, too
        plain = load(tmp_path, quantization=name, quantization_execution="dequantise", **ON_HPU)
        assert got == tokens(plain)
