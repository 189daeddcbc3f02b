"""Weights that stay codes in memory are served with the tokens of dequantised ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hpu_duo.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from hpu_duo.device import run_processes
from hpu_duo.lab.audit import build_structure
from hpu_duo.modeling.loading import load_model, read_config
from hpu_duo.modeling.quantised.checkpoint import QuantisedTensor
from hpu_duo.modeling.quantised.panels import KERNEL
from hpu_duo.modeling.quantised.rounding import FORMATS, rounded
from hpu_duo.modeling.quantised.state import quantised_layers
from hpu_duo.modeling.quantised.weight import QuantisedWeight
from hpu_duo.planning import GAUDI2
from hpu_duo.planning.model import Format
from hpu_duo.planning.read_model import read_model
from tests.engine.tiny import PATTERN
from tests.modeling.families import make_config, save_random
from tests.modeling.test_value_sizes import LATENT, ROUTED
from tests.needs import needs_x86_kernels
from tests.quantised.test_checkpoints import LAYOUTS, PROMPTS, SIZES, load, tokens, twins
from tests.quantised.test_encodings import stored
from tests.quantised.test_ranks import CODES, TWINS, case_of
from tests.quantised.writers import KINDS, Kind, fp8
from tests.ranks.work import serve
from tests.tiers import further

LATENT_LINEAR = r".*\.layers\..*_(proj|with_mqa)\.weight"


@pytest.mark.parametrize(
    "name", ["fp8 block", *further("int8 zeros"), "packed mixed", *further("gptq mixed"), "awq"]
)
def test_tokens_are_those_of_dequantised_weights(name: str, tmp_path: Path) -> None:
    _, path = twins(tmp_path, "LlamaConfig", KINDS[name])
    for pattern in (None, PATTERN):
        served = load(path, quantization_execution="stored", pattern=pattern)
        assert tokens(served) == tokens(load(path, quantization_execution="dequantise", pattern=pattern))
        assert any("stay codes" in note for note in served.stats().notes)


def test_plain_weights_are_not_served_from_codes(tmp_path: Path) -> None:
    plain, _ = twins(tmp_path, "LlamaConfig", KINDS["int8"])
    with pytest.raises(ValueError, match=r"stored needs quantised weights, .* got plain weights in"):
        load(plain, quantization_execution="stored")


@pytest.mark.usefixtures("default_buckets")
def test_bytes_of_a_checkpoint_are_those_of_its_files(tmp_path: Path) -> None:
    plain, path = twins(tmp_path, "LlamaConfig", KINDS["gptq mixed"])
    stored = sum(each.nbytes for each in load_file(path / "model.safetensors").values())
    assert read_model(path).weight_bytes(Format.BF16) == stored
    assert read_model(plain).stored_bytes is None
    limits = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)
    cache = CacheConfig(block_size=16, num_blocks=64)
    config = EngineConfig(model=ModelConfig(path=path), cache=cache, scheduler=limits)
    assert build_structure(config, GAUDI2).weight_bytes == stored


def test_older_transformers_get_no_dequantised_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = twins(tmp_path, "LlamaConfig", KINDS["packed"])
    expected = load_model(path, read_config(path), torch.float32, torch.device("cpu")).state_dict()
    monkeypatch.setattr("hpu_duo.modeling.loading.is_transformers_5", lambda: False)
    monkeypatch.setattr(QuantisedTensor, "source", lambda self: pytest.fail("a whole state of plain weights"))
    got = load_model(path, read_config(path), torch.float32, torch.device("cpu")).state_dict()
    assert expected.keys() == got.keys()
    assert all(torch.equal(got[name], each) for name, each in expected.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_models(layout: str, tmp_path: Path) -> None:
    config, fields, names = LAYOUTS[layout]
    plain, path = twins(tmp_path, config, KINDS["gptq"], names, **fields)
    assert tokens(load(path, quantization_execution="stored")) == tokens(load(plain))


@pytest.mark.parametrize("scheme", [None, "dynamic"])
def test_the_projection_from_latents_is_split_and_does_not_stay_codes(
    tmp_path: Path, scheme: str | None
) -> None:
    fields = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": scheme}
    kind = Kind({k: v for k, v in fields.items() if v}, fp8("block", "weight_scale_inv", block=(16, 16)))
    plain, path = twins(
        tmp_path,
        "DeepseekV3Config",
        kind,
        LATENT_LINEAR,
        **{**ROUTED, **LATENT, "moe_intermediate_size": 32},
    )
    served = load(path, quantization_execution="stored", pack_weights=False)
    model = served.engine.runner.model
    assert all(spec.stores_latents for spec in model.specs)
    codes = quantised_layers(model.model)
    assert any("q_b_proj" in name for name in codes)
    assert not any("kv_b_proj" in name for name in codes)
    same = load(path, quantization_execution="dequantise") if scheme else load(plain)
    assert tokens(served) == tokens(same)


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_serve_codes(tmp_path: Path) -> None:
    plain, quantised = case_of(tmp_path, *TWINS["groups"])
    model = {"quantization_execution": "stored"}
    cases = {"plain": plain, "codes": replace(quantised, model={**quantised.model, **model})}
    answers = run_processes(serve, (cases,), [{}] * 2, 600)[0]
    assert answers["codes"].tokens == answers["plain"].tokens


@pytest.mark.parametrize("name", KINDS)
def test_outputs_and_inputs_of_codes_are_reordered_and_cut(name: str) -> None:
    tensors, expected = KINDS[name].write(np.random.default_rng(0), 96, 96)
    weight, plain = stored(KINDS[name], tensors).read(), torch.from_numpy(expected.astype(np.float32))
    assert isinstance(weight, QuantisedWeight)
    generator = torch.Generator().manual_seed(0)
    whole = torch.arange(96).view(2, 48).flip(0).flatten()
    for index in (whole, torch.randperm(96, generator=generator), torch.arange(24, 72), torch.arange(20, 60)):
        assert torch.equal(weight.select(0, index).dequantised(torch.float32), plain[index])
        assert torch.equal(weight.select(1, index).dequantised(torch.float32), plain[:, index])
        both = weight.select(1, index).select(1, index.argsort()).dequantised(torch.float32)
        assert torch.equal(both, plain[:, index[index.argsort()]])


def test_whole_groups_move_without_an_index() -> None:
    tensors, _ = KINDS["gptq"].write(np.random.default_rng(0), 32, 64)
    weight = stored(KINDS["gptq"], tensors).read()
    assert isinstance(weight, QuantisedWeight)
    assert weight.block == (1, 16)
    moved = torch.arange(64).view(2, 32).flip(0).flatten()
    assert weight.select(1, moved).group_of is None
    assert weight.select(1, moved.roll(8)).group_of is not None


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_is_to_the_nearest_code(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[0], weight[1, 7], weight[2] = 0, 1e4, weight[2] * 1e-30
    found = rounded(weight, name, dtype)
    values, exact = found.dequantised(torch.float32), weight.float()
    step = found.scales.float().repeat_interleave(found.block[1], 1)
    # Scales are rounded, so the largest value may be beyond the last code by a part of the scale's rounding.
    beyond = exact.abs() * 2 ** (-8 if dtype is torch.bfloat16 else -23)
    if name == "fp8":
        bound = torch.maximum(values.abs() * 2**-4, step * 2**-10) + beyond
    else:
        bound = step / 2 + beyond
    assert bool(((values - exact).abs() <= bound * 1.0001).all())
    assert torch.equal(
        rounded(weight[5:6], name, dtype).codes.view(torch.uint8), found.codes[5:6].view(torch.uint8)
    )
    with pytest.raises(ValueError, match="expected finite weights to quantise"):
        rounded(weight / 0, name, dtype)


@pytest.mark.parametrize(("name", "most"), [("int8", 0.51), ("int4", 0.28), ("fp8", 0.51)])
def test_memory_of_linear_layers(name: str, most: float, tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 512}
    save_random(make_config("LlamaConfig", **sizes), tmp_path)
    execution = replace(CODES, rounding=name)
    model = load_model(tmp_path, read_config(tmp_path), torch.bfloat16, torch.device("cpu"), execution)
    layers = quantised_layers(model)
    assert len(layers) == 7 * SIZES["num_hidden_layers"]
    held = sum(each.nbytes for layer in layers.values() for each in layer.buffers())
    plain = sum(2 * layer.in_features * layer.out_features for layer in layers.values())
    assert held <= most * plain
    assert not any(name.endswith("proj.weight") for name in model.state_dict())


def test_formats_and_bytes_of_weights_are_reported(tmp_path: Path) -> None:
    plain, path = twins(tmp_path, "LlamaConfig", KINDS["gptq"])
    found = load(path, quantization_execution="stored").stats().resolved
    assert found.weights == "int4 g16 (dequantised at each use) in 14 layers"
    whole = load(plain).stats().resolved
    assert whole.weights == "plain"
    # Embedding table and output head are plain.
    assert found.weight_bytes < whole.weight_bytes * 0.6


@needs_x86_kernels
@pytest.mark.instruction_set
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_read_by_the_kernel_where_there_is_one(name: str, tmp_path: Path) -> None:
    save_random(make_config("LlamaConfig", **{**SIZES, "hidden_size": 128, "dtype": "bfloat16"}), tmp_path)
    served = load(tmp_path, dtype="auto", quantization=name)
    found = served.stats().resolved.weights
    # The 48 inputs of a layer are no whole groups of 32.
    assert found == f"{name} ({KERNEL}) in {12 if name == 'int4' else 14} layers"
    assert all(len(each) == len(prompt) + 6 for each, prompt in zip(tokens(served), PROMPTS, strict=True))
    plain = load(tmp_path, dtype="auto", quantization=name, quantization_execution="dequantise")
    assert plain.stats().resolved.weights == "plain"


@needs_x86_kernels
def test_layers_that_the_kernel_does_not_read_are_dequantised(tmp_path: Path) -> None:
    _, path = twins(tmp_path, "LlamaConfig", KINDS["gptq"])  # groups of 16 inputs
    assert load(path).stats().resolved.weights == "plain"
