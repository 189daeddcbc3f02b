"""Checkpoints that state how inputs of linear layers are rounded: served so, or with weights only."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hpu_duo.lab.sim.device import take
from hpu_duo.lab.sim.fused import named
from hpu_duo.modeling.quantised.format import Activations
from hpu_duo.modeling.quantised.hpu import HPUFp8Linear
from hpu_duo.modeling.quantised.linear import QuantisedLinear, round_inputs
from hpu_duo.modeling.quantised.rounding import rounded
from kernels_ref.x86 import library
from tests.quantised.test_checkpoints import load, tokens, twins
from tests.quantised.test_hpu import ON_HPU
from tests.quantised.writers import KINDS, Kind, fp8

_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_TENSOR = {"num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
Way = tuple[str, dict[str, Any], bool]
_BLOCK = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"]}
_KINDS = {**KINDS, "fp8 small block": Kind(_BLOCK, fp8("block", "weight_scale_inv", (16, 16)))}
WAYS: dict[str, Way] = {
    "int8 by token": ("int8", {"input_activations": {**_TOKEN, "type": "int"}}, False),
    "int8 static": ("int8", {"input_activations": {**_TENSOR, "type": "int"}}, True),
    "fp8 by token": ("float channel", {"input_activations": {**_TOKEN, "type": "float"}}, False),
    "fp8 static": ("fp8 tensor", {}, True),
    "fp8 by group": ("fp8 small block", {"activation_scheme": "dynamic"}, False),
    "int8 inputs, int4 weights": ("packed", {"input_activations": {**_TOKEN, "type": "int"}}, False),
}


def write(directory: Path, way: Way) -> Path:
    """A checkpoint that states the rounding of inputs, with a scale of 0.03 where it is static."""
    kind, fields, is_static = way
    _, path = twins(directory, "LlamaConfig", _KINDS[kind])
    return edited(path, fields, 0.03 if is_static else None)


def edited(path: Path, fields: dict[str, Any], scale: float | None) -> Path:
    file = path / "config.json"
    config = json.loads(file.read_text())
    quantised = config["quantization_config"]
    target = quantised["config_groups"]["group_0"] if "config_groups" in quantised else quantised
    target.update(fields)
    file.write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    names = [name.removesuffix("_scale") for name in tensors if name.endswith("weight_scale")]
    if scale is not None:
        tensors |= {name.removesuffix("weight") + "input_scale": torch.tensor(scale) for name in names}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def by_numpy(x: torch.Tensor, kind: str, scale: float | None, group: int | None) -> torch.Tensor:
    """The rounding by its definition: the nearest of all codes, the even one of two."""
    if kind == "int8":
        codes = np.arange(-128, 128, dtype=np.float64)
    else:
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
        codes = np.unique(every[np.isfinite(every)])
    most = codes.max()
    rows = x.double().numpy().reshape(-1, group or x.shape[-1])
    result = np.empty_like(rows)
    for row, values in enumerate(rows):
        step = np.float32(scale) if scale is not None else np.float32(np.abs(values).max()) / np.float32(most)
        scaled = values.astype(np.float32) / step
        distance = np.abs(scaled.astype(np.float64)[:, None] - codes)
        nearest = distance == distance.min(axis=1, keepdims=True)
        is_even = np.arange(len(codes)) % 2 == (0 if kind == "int8" else len(codes) // 2 % 2)
        for place, choice in enumerate(nearest):
            found = np.flatnonzero(choice)
            if not len(found):  # NaN
                result[row, place] = values[place]
                continue
            best = next((i for i in found if is_even[i]), found[0])
            result[row, place] = np.float32(codes[best]) * step
    return torch.from_numpy(result.reshape(x.shape)).to(x.dtype)


@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("scale", [None, 0.03])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rounding_is_to_the_nearest_code(kind: str, scale: float | None, group: int | None) -> None:
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0)) * 3
    x[1, 5] = 1000
    given = None if scale is None else torch.tensor(scale)
    got = round_inputs(x, Activations(kind, scale is not None, group), given)
    assert torch.equal(got, by_numpy(x, kind, scale, group))
    assert not round_inputs(torch.zeros(2, 48), Activations(kind, False, group), None).any()


class Recorder:
    """The layers' own rounding, exchanged for the one by numpy."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor, way: Activations, scale: torch.Tensor | None) -> torch.Tensor:
        self.calls += 1
        return by_numpy(x, way.kind, None if scale is None else float(scale), way.group)


@pytest.mark.parametrize("name", WAYS)
def test_tokens_are_those_of_plain_weights_with_rounded_inputs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, WAYS[name])
    served = load(path)
    got = tokens(served)
    assert any("inputs rounded as the checkpoint states" in note for note in served.stats().notes)
    if name.startswith("int8 ") and "," not in name and library.lanes():
        assert "int8, inputs of int8" in served.stats().resolved.weights
    record = Recorder()
    monkeypatch.setattr("hpu_duo.modeling.quantised.linear.round_inputs", record)
    plain = load(path, quantization_execution="dequantise", graphs="eager")
    assert tokens(plain) == got
    assert record.calls > 0
    assert plain.stats().resolved.weights == "plain"


def test_weights_only_is_a_choice(tmp_path: Path) -> None:
    path = write(tmp_path, WAYS["int8 by token"])
    served = load(path, activations="weights")
    plain, _ = twins(tmp_path / "again", "LlamaConfig", KINDS["int8"])
    assert tokens(served) == tokens(load(plain))
    assert "inputs" not in " ".join((*served.stats().notes, served.stats().resolved.weights))
    with pytest.raises(ValueError, match="expected activations to be one of"):
        load(path, activations="int8")


def _asymmetric(path: Path) -> None:
    edited(path, {"input_activations": {**_TOKEN, "type": "int", "symmetric": False}}, None)


REFUSED: dict[str, tuple[Way, Callable[[Path], object], str]] = {
    "asymmetric": (WAYS["int8 by token"], _asymmetric, "symmetric: False"),
    "without a scale": (("int8", WAYS["int8 static"][1], False), lambda path: None, "input_scale beside it"),
    "a scale of 0": (WAYS["int8 static"], lambda path: edited(path, {}, 0.0), "input_scale above 0, got 0.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    way, edit, words = REFUSED[name]
    path = write(tmp_path, way)
    edit(path)
    with pytest.raises(ValueError, match=words):
        load(path)
    assert load(path, activations="weights").stats().notes


@pytest.mark.parametrize("device", ["GAUDI2", "GAUDI3"])
def test_scales_of_fp8_inputs_on_the_simulated_device(device: str) -> None:
    take()
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(1)).bfloat16() * 8
    for scale in (None, 0.1):
        way = Activations("fp8", scale is not None)
        stored = replace(rounded(weight, "fp8", torch.bfloat16), activations=way, input_scale=scale)
        layer = QuantisedLinear(128, 48, None, stored)
        with named(device):
            got = HPUFp8Linear(layer, is_narrow=device == "GAUDI2")(x).double()
        expected = layer(x.float()).double()
        # A narrow format has codes of half the size, and the smallest of them are rounded.
        assert float((got - expected).norm() / expected.norm()) < 2**-7, (scale, device)


@pytest.mark.usefixtures("default_buckets")
def test_layers_of_fp8_inputs_run_by_operators_on_the_simulated_device(tmp_path: Path) -> None:
    path = write(tmp_path, WAYS["fp8 by token"])
    assert "fp8 (HPU operators)" in load(path, **ON_HPU).stats().resolved.weights
    assert load(path, activations="weights", **ON_HPU).stats().resolved.weights == "plain"
