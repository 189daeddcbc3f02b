"""Damaged or mislabelled quantised checkpoints are refused in one sentence."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hpu_duo.modeling.loading import load_model, read_config
from hpu_duo.modeling.quantised.checkpoint import dequantised, stored_tensors
from hpu_duo.modeling.quantised.config import find_quantisation, stored_weight_bytes
from hpu_duo.modeling.quantised.format import Header
from tests.modeling.families import make_config, save_random
from tests.quantised.writers import KINDS, Tensors, headers_of, mxfp4, set_config, write_twins
from tests.tiers import EXHAUSTIVE

Edit = Callable[[dict[str, Any], Tensors], Any]
"""Changes a configuration, and the tensors of a weight ``[32, 48]``, in place."""


def _set(name: str, value: Any) -> Edit:
    return lambda config, tensors: config.update({name: value})


def _weights(**fields: Any) -> Edit:
    return lambda config, tensors: config["config_groups"]["group_0"]["weights"].update(fields)


def _drop(name: str) -> Edit:
    return lambda config, tensors: tensors.pop(name)


def _put(name: str, tensor: torch.Tensor) -> Edit:
    return lambda config, tensors: tensors.update({name: tensor})


def _cut(name: str, size: int) -> Edit:
    return lambda config, tensors: tensors.update({name: tensors[name][:size].contiguous()})


def _only(name: str, tensor: torch.Tensor) -> Edit:
    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        tensors.clear()
        tensors[name] = tensor

    return edit


REFUSED: dict[str, tuple[str, Edit, str]] = {
    # configurations
    "bits that straddle": (
        "gptq",
        _set("bits", 3),
        r"bits to be 2, 4, 8 \(codes that do not straddle",
    ),
    "packed bits that straddle": ("packed", _weights(num_bits=3), r"num_bits to be 2, 4, 8 .*, got 3"),
    "marlin": ("gptq", _set("checkpoint_format", "marlin"), "checkpoint_format to be gptq or gptq_v2"),
    "another name of the layout": ("gptq", _set("format", "marlin"), "format to be gptq .*, got 'marlin'"),
    "two layouts": ("gptq 2", _set("format", "gptq"), "format to be gptq_v2 in the .*, got 'gptq'"),
    "gemv by its other name": ("awq", _set("format", "gemv"), "format to be gemm .*, got 'gemv'"),
    "order of inputs": ("packed", _weights(actorder="random"), "actorder to be .*, got 'random'"),
    "layers of their own": ("gptq", _set("dynamic", {"+:x": {}}), "dynamic to be absent"),
    "no group size": ("gptq", _set("group_size", 0), "group_size to be at least 1, or -1"),
    "gemv": ("awq", _set("version", "gemv"), "version to be gemm .*, got 'gemv'"),
    "awq without zeros": ("awq", _set("zero_point", False), "zero_point to be True"),
    "e5m2": ("fp8 block", _set("fmt", "e5m2"), "fmt to be e4m3"),
    "no block": ("fp8 block", _set("weight_block_size", [128]), "weight_block_size to be two sizes"),
    "modelopt nvfp4": ("modelopt", _set("quant_algo", "NVFP4"), "quant_algo to be FP8 .*, got 'NVFP4'"),
    "nvfp4": (
        "packed",
        _set("format", "nvfp4-pack-quantized"),
        "got 'nvfp4-pack-quantized: n",
    ),
    "marlin-24": ("packed", _set("format", "marlin-24"), "got 'marlin-24: 2:4 sparsity"),
    "sparse": (
        "packed",
        _set("sparsity_config", {"format": "sparse-24-bitmask"}),
        r"absent \(dense w",
    ),
    "rotations": (
        "packed",
        _set("transform_config", {"config_groups": {"R1": {}}}),
        r"absent \(no rot",
    ),
    "no number": ("packed", _weights(type="float"), "type to be int .*, got 'float'"),
    "no strategy": ("packed", _weights(strategy="tensor_group"), "strategy to be group or channel"),
    "wrong pattern": ("packed", _set("ignore", ["re:("]), "regular expressions after 're:'"),
    "bitsandbytes": ("gptq", _set("quant_method", "bitsandbytes"), "mxfp4, got bitsandbytes .* CUDA kernels"),
    "hqq": ("gptq", _set("quant_method", "hqq"), "got hqq .*load the checkpoint that they were made from"),
    "aqlm": ("gptq", _set("quant_method", "aqlm"), "got aqlm .*load the checkpoint that they were made from"),
    "torchao": ("gptq", _set("quant_method", "torchao"), "got torchao .*subclasses"),
    "gguf": ("gptq", _set("quant_method", "gguf"), "got gguf .*gguf_file=FILE"),
    "gptq_marlin": ("gptq", _set("quant_method", "gptq_marlin"), "got gptq_marlin .*order of a CUDA kernel"),
    "a list": ("gptq", _set("quant_method", ["gptq"]), r"got \['gptq'\]"),
    # tensors that the configuration does not describe
    "fp8, says gptq": (
        "gptq",
        _only("weight", torch.zeros(32, 48).to(torch.float8_e4m3fn)),
        r"q_proj.weight to be of gptq, with \*.qweight, .*, got a quantised weight \(F8_E4M3 \[32, 48\]\) in",
    ),
    "experts in one tensor": (
        "fp8 tensor",
        _put("experts.gate_up_proj", torch.zeros(2, 8, 4).to(torch.float8_e4m3fn)),
        r"to be of fp8, with \*.weight, .*, got a quantised weight \(F8_E4M3 \[2, 8, 4\]\)",
    ),
    "awq, says gptq": (
        "awq",
        _set("quant_method", "gptq"),
        "layout of gptq, .*, got that of awq in model",
    ),
    "gptq, says awq": (
        "gptq",
        _set("quant_method", "awq"),
        "layout of awq, .*, got that of gptq in model",
    ),
    "packed, says fp8": (
        "packed",
        lambda config, tensors: (config.clear(), config.update(quant_method="fp8")),
        r"to be of fp8, with \*.weight, .*, got what compressed-tensors writes \(I32",
    ),
    "plain, says gptq": (
        "gptq",
        _only("weight", torch.ones(32, 48)),
        r"such as \*.qweight, .*, got none in",
    ),
    "dense": (
        "int8",
        _put("weight", torch.ones(32, 48)),
        "weight_scale to be of compressed-tensors, .*, got what compressed-tensors, fp8 or modelopt writes",
    ),
    "a plain one too": (
        "gptq",
        _put("weight", torch.ones(32, 48)),
        "without q_proj.weight beside it, got both",
    ),
    "ignored": ("gptq", _set("modules_to_not_convert", ["q_proj"]), "a plain weight, .*, got I32 codes"),
    "in no group": (
        "packed",
        lambda config, tensors: config["config_groups"]["group_0"].update(targets=["re:.*k_proj"]),
        "to be of a group in .*, got a layer that no target names",
    ),
    "int8, says float": (
        "int8",
        lambda config, tensors: config.update(copy.deepcopy(KINDS["naive float"].config)),
        "weight of dtype F8_E4M3, got I8 in model.safetensors",
    ),
    # shapes and values
    "no zeros": ("gptq", _drop("qzeros"), "qweight with q_proj.qzeros beside it, .*, got none"),
    "no packed zeros": (
        "packed zeros",
        _drop("weight_zero_point"),
        "with q_proj.weight_zero_point beside it",
    ),
    "no scale": ("int8", _drop("weight_scale"), "with q_proj.weight_scale beside it"),
    "no fp8 scale": (
        "fp8 tensor",
        _drop("weight_scale"),
        "and weight_scale_inv beside it, got none",
    ),
    "no index": ("gptq mixed", _drop("g_idx"), "with q_proj.g_idx beside it"),
    "groups that do not divide": ("gptq", _set("group_size", 20), "whole groups of 20, got 48 inputs"),
    "packed groups": ("packed", _weights(group_size=20), "whole groups of 20, got 48 inputs"),
    "awq groups": ("awq", _set("group_size", 20), "whole groups of 20, got 48 inputs"),
    "cut codes": ("packed", _cut("weight_packed", 30), r"shape \[32, 6\] \(4 bits .*\), got \[30, 6\]"),
    "cut scales": ("int8", _cut("weight_scale", 30), r"shape \[32, 1\] or \[32\] .*, got \[30, 1\]"),
    "cut blocks": (
        "fp8 block",
        _cut("weight_scale_inv", 1),
        r"\[2, 3\] \(blocks of \[24, 20\] .*\[1, 3\]",
    ),
    "scales of whole bits": (
        "fp8 block",
        _put("weight_scale_inv", torch.ones(2, 3).to(torch.float8_e8m0fnu)),
        "weight_scale_inv of dtype F32 or BF16 or F16, got F8_E8M0",
    ),
    "cut zeros": ("gptq", _cut("qzeros", 2), r"qzeros of shape \[3, 4\], got \[2, 4\]"),
    "index too large": ("gptq mixed", _put("g_idx", torch.full((48,), 3)), "groups from 0 to 2, got 3 to 3"),
    "unsorted index": ("gptq mixed", _set("desc_act", False), "in order, since desc_act is false"),
    "zeros of no version": ("gptq", _set("sym", True), "qzeros to be 7 or 8, since sym is true"),
    "zeros of a symmetric one": ("packed zeros", _weights(symmetric=True), "to be 0 in a symmetric encoding"),
    "int8 zeros": ("int8 zeros", _weights(symmetric=True), "to be 0 in a symmetric encoding"),
    "no packed index": (
        "packed mixed",
        _drop("weight_g_idx"),
        "weight_packed with q_proj.weight_g_idx beside it, .*, got none",
    ),
    "an index that was never used": (
        "packed mixed",
        _put("weight_g_idx", torch.full((48,), -1, dtype=torch.int32)),
        "groups from 0 to 2, got -1 to -1",
    ),
    "an index of one group": (
        "gptq mixed",
        _put("g_idx", torch.zeros(48, dtype=torch.int32)),
        "g_idx with 16 inputs in each group, got 0 to 48",
    ),
    "scales of an activation": (
        "awq",
        _put("act.scales", torch.ones(48)),
        r"act.scales to be of awq, .*, got what gptq or awq writes \(F32",
    ),
    "factors of inputs": (
        "modelopt",
        _put("pre_quant_scale", torch.ones(48)),
        "pre_quant_scale to be absent, got it beside the quantised weight of q_proj in model",
    ),
    "an adapter within": (
        "gptq",
        _put("lora_A.weight", torch.ones(8, 48)),
        "lora_A.weight to be absent, got it beside the quantised weight of q_proj in model",
    ),
    "a plain weight in whole numbers": (
        "gptq",
        _put("norm.weight", torch.ones(48, dtype=torch.int32)),
        r"norm.weight to be of gptq, .*, got a quantised weight \(I32 \[48\]\)",
    ),
    "not finite": (
        "gptq",
        lambda config, tensors: tensors["scales"].fill_(torch.nan),
        "scales of finite numbers, got infinity or NaN",
    ),
    "codes that are no numbers": (
        "modelopt",
        lambda config, tensors: tensors["weight"].view(torch.uint8)[20].fill_(0xFF),
        "q_proj.weight of finite numbers, got codes of NaN in model",
    ),
    "no shape": (
        "packed",
        _put("weight_shape", torch.tensor([0, 48])),
        r"sizes of at least 1, got \[0, 48\]",
    ),
}


def read(config: dict[str, Any], tensors: Tensors) -> None:
    """Read the weight of one layer."""
    found = find_quantisation(Path("config.json"), {"quantization_config": config})
    assert found is not None
    headers = headers_of({f"q_proj.{end}": tensor for end, tensor in tensors.items()})
    dequantised(headers, found, torch.float32)["q_proj.weight"][...]


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(name: str) -> None:
    kind, edit, message = REFUSED[name]
    config = copy.deepcopy(KINDS[kind].config)
    tensors, _ = KINDS[kind].write(np.random.default_rng(0), 32, 48)
    read(config, dict(tensors))
    edit(config, tensors)
    with pytest.raises(ValueError, match=message) as raised:
        read(config, tensors)
    assert "\n" not in str(raised.value)
    assert "model.safetensors" in str(raised.value) or "config.json" in str(raised.value)


def test_experts_in_mxfp4_of_another_shape_are_refused() -> None:
    found = find_quantisation(Path("config.json"), {"quantization_config": {"quant_method": "mxfp4"}})
    assert found is not None
    tensors, _ = mxfp4(np.random.default_rng(0), 2, 4, 64)
    for end, wrong in (("_blocks", tensors["_blocks"][..., :8]), ("_scales", tensors["_scales"][:1])):
        headers = headers_of({f"gate_up_proj{e}": t for e, t in {**tensors, end: wrong}.items()})
        with pytest.raises(ValueError, match=rf"gate_up_proj{end} of shape .*, got .* in model.safetensors"):
            dequantised(headers, found, torch.float32)


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    save_random(make_config("LlamaConfig", **sizes, **heads), tmp_path / "plain")
    return write_twins(tmp_path / "plain", tmp_path / "quantised", KINDS["gptq"])


def load(path: Path) -> None:
    load_model(path, read_config(path), torch.float32, torch.device("cpu"))


def test_values_that_are_found_while_reading_are_refused_by_our_sentence(quantised: Path) -> None:
    set_config(quantised, {**KINDS["gptq"].config, "sym": True})
    with pytest.raises(ValueError, match=r"^expected model\.layers\.0\..*qzeros to be 7 or 8, since sym"):
        load(quantised)


def test_weights_of_another_shape_than_the_model_s_are_refused(quantised: Path) -> None:
    file = quantised / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 64}))
    with pytest.raises(ValueError, match=r"do not fit the configuration: .*down_proj.weight|shape"):
        load(quantised)


def test_layers_with_transposed_weights_are_refused(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 96}
    save_random(make_config("GPT2Config", **sizes), tmp_path / "plain")
    square = write_twins(tmp_path / "plain", tmp_path / "q", KINDS["gptq"], names=r".*attn\.c_proj\.weight")
    with pytest.raises(ValueError, match=r"expected linear layers .*, got Conv1D .*c_attn"):
        load(square)


def test_a_layer_that_is_missing_is_named(quantised: Path) -> None:
    stored = load_file(quantised / "model.safetensors")
    left = {name: tensor for name, tensor in stored.items() if "mlp.up_proj" not in name}
    save_file(left, quantised / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"expected model.layers.0.mlp.up_proj.weight, got none"):
        load(quantised)


@pytest.mark.parametrize("kind", ["fp8 tensor", "int8"])
def test_codes_of_which_no_configuration_says_anything_are_refused(kind: str, quantised: Path) -> None:
    other = write_twins(quantised.parent / "plain", quantised.parent / kind, KINDS[kind])
    set_config(other, None)
    message = r"^expected model\.layers\.0.*_proj\.weight to be plain, since no .*, got (F8|I8)"
    with pytest.raises(ValueError, match=message):
        load(other)
    with pytest.raises(ValueError, match=message):
        stored_tensors(other, torch.float32)


def test_a_tensor_in_two_files_is_refused_and_files_that_the_index_does_not_name_are_not_read(
    quantised: Path,
) -> None:
    expected = stored_tensors(quantised, torch.float32)
    stored = quantised / "model.safetensors"
    shutil.copy(stored, quantised / "old.safetensors")
    assert stored_tensors(quantised, torch.float32).keys() == expected.keys()
    stored.rename(quantised / "new.safetensors")
    with pytest.raises(ValueError, match=r"to be in one file, got another in .*new\.safetensors in .*old\."):
        stored_tensors(quantised, torch.float32)
    index = quantised / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(expected, "new.safetensors")}))
    found = stored_tensors(quantised, torch.float32).values()
    assert {each.file.name for each in found if isinstance(each, Header)} == {"new.safetensors"}
    index.write_text(json.dumps({"weight_map": {"x": "none.safetensors"}}))
    with pytest.raises(ValueError, match=r"expected to read .*none\.safetensors, got: "):
        stored_tensors(quantised, torch.float32)
    index.write_text("[]")
    with pytest.raises(ValueError, match=r"expected a weight_map of names of files in .*index\.json, got: "):
        stored_tensors(quantised, torch.float32)


def test_a_truncated_file_is_refused(quantised: Path) -> None:
    file = quantised / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"expected whole .*safetensors"):
        load(quantised)
    for size in (2**64 - 1, 2**62):
        file.write_bytes(size.to_bytes(8, "little"))
        with pytest.raises(ValueError, match=rf"expected a safetensors file.*a header of {size} bytes"):
            stored_weight_bytes(quantised)


ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 3, 2**70, 1.5, "", "re:(", "x"),
    *([], {}, [1], [None], {"a": 1}, [[2, 2], 3]),
)


def damaged(value: Any, draw: random.Random) -> Any:
    """A copy of a configuration with some values replaced, and some names lost."""
    if draw.random() < 0.06:
        return draw.choice(ODD)
    if isinstance(value, dict):
        return {name: damaged(each, draw) for name, each in value.items() if draw.random() > 0.04}
    if isinstance(value, list):
        return [damaged(each, draw) for each in value]
    return value


def fuzz_config(seed: int) -> str:
    """Read a damaged configuration, and tensors some of which are; return the error, or ""."""
    draw = random.Random(seed)
    kind = KINDS[draw.choice(sorted(KINDS))]
    tensors, _ = kind.write(np.random.default_rng(seed), 32, 48)
    config = copy.deepcopy(kind.config)
    config[draw.choice(["ignore", "format", "bits", "dynamic", "unknown"])] = draw.choice(ODD)
    for end in [*tensors]:
        if draw.random() < 0.05:
            others = [*tensors.values(), torch.ones(()), torch.zeros(0, 4, dtype=torch.int32)]
            tensors[end] = draw.choice(others)
    try:
        found = find_quantisation(Path("config.json"), {"quantization_config": damaged(config, draw)})
        if found is None:
            return ""
        headers = headers_of({f"layers.0.q_proj.{end}": tensor for end, tensor in tensors.items()})
        for tensor in dequantised(headers, found, torch.float32).values():
            assert tuple(tensor[...].shape) == tensor.shape
    except ValueError as error:
        return str(error)
    return ""


def fuzz_header(path: Path, data: bytes, seed: int) -> str:
    """Read a file with a damaged header; return the error, or ""."""
    draw = random.Random(seed)
    size = int.from_bytes(data[:8], "little")
    header = bytearray(data[8 : 8 + size])
    for _ in range(draw.randint(1, 4)):
        header[draw.randrange(size)] = draw.choice(b'0123456789[]{}:,"IFU_w ')
    (path / "model.safetensors").write_bytes(data[:8] + bytes(header) + data[8 + size :])
    try:
        for tensor in stored_tensors(path, torch.float32).values():
            tensor[...]
    except ValueError as error:
        return str(error)
    return ""


def assert_a_sentence(error: str, seed: int) -> None:
    assert not error or (error.startswith("expected ") and "\n" not in error), (seed, error)


MANY = pytest.param(10_000, marks=EXHAUSTIVE)


@pytest.mark.parametrize("count", [400, MANY])
def test_damaged_configurations_end_in_a_sentence(count: int) -> None:
    errors = [fuzz_config(seed) for seed in range(count)]
    for seed, error in enumerate(errors):
        assert_a_sentence(error, seed)
    assert "" in errors


@pytest.mark.parametrize("count", [150, MANY])
def test_damaged_headers_end_in_a_sentence(count: int, quantised: Path) -> None:
    data = (quantised / "model.safetensors").read_bytes()
    for seed in range(count):
        assert_a_sentence(fuzz_header(quantised, data, seed), seed)
