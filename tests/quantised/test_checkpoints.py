"""Quantised checkpoints are served with exactly the tokens of the plain weights of their codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hpu_duo import HPUDuoModel
from hpu_duo.config.engine import SETTINGS
from hpu_duo.modeling.hub import model_fingerprint
from hpu_duo.modeling.loading import load_model, read_config
from hpu_duo.modeling.quantised.config import METHODS
from hpu_duo.modeling.quantised.inc import METHOD as INC
from hpu_duo.modeling.quantised.rounding import FORMATS
from tests.engine.tiny import PATTERN
from tests.modeling.families import BLOCK, FAMILIES, IS_5, make_config, prompts_of, save_random
from tests.quantised.writers import KINDS, LINEAR, Kind, fp8, mxfp4, set_config, write_twins
from tests.tiers import crossed

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPTS = prompts_of([5, 19])


def twins(directory: Path, name: str, kind: Kind, names: str = LINEAR, **fields: Any) -> tuple[Path, Path]:
    """A plain checkpoint and the quantised one that it comes from."""
    plain = directory / "plain"
    save_random(make_config(name, **{**SIZES, **fields}), plain)
    return plain, write_twins(plain, directory / "quantised", kind, names=names)


def load(path: Path, **options: Any) -> HPUDuoModel:
    defaults = {"attention": "reference", "dtype": "float32", "block_size": BLOCK, "max_num_seqs": 2}
    return HPUDuoModel.from_pretrained(path, **{**defaults, "max_model_len": 64, **options})


def tokens(model: HPUDuoModel) -> list[list[int]]:
    return [model.generate([prompt], max_new_tokens=6)[0].tolist() for prompt in PROMPTS]


def weights(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_model(path, read_config(path), dtype, torch.device("cpu")).state_dict()


def assert_same_weights(plain: Path, quantised: Path, dtype: torch.dtype = torch.float32) -> None:
    expected, got = weights(plain, dtype), weights(quantised, dtype)
    assert expected.keys() == got.keys()
    for name, weight in expected.items():
        assert torch.equal(got[name], weight), name


@pytest.mark.parametrize("name", KINDS)
def test_every_producer_loads_the_weights_of_the_plain_twin(name: str, tmp_path: Path) -> None:
    plain, quantised = twins(tmp_path, "LlamaConfig", KINDS[name])
    assert_same_weights(plain, quantised)
    assert_same_weights(plain, quantised, torch.bfloat16)


@pytest.mark.parametrize("name", ["fp8 block", "packed zeros", "gptq mixed", "awq"])
def test_tokens_are_those_of_the_plain_twin(name: str, tmp_path: Path) -> None:
    plain, quantised = twins(tmp_path, "LlamaConfig", KINDS[name])
    served = load(quantised, quantization_execution="dequantise")
    assert tokens(served) == tokens(load(plain))
    assert any("dequantised at load" in note for note in served.stats().notes)


@pytest.mark.parametrize("name", ["packed mixed", "fp8 block"])
def test_heads_of_a_pattern_are_permuted_after_weights_are_dequantised(name: str, tmp_path: Path) -> None:
    plain, quantised = twins(tmp_path, "LlamaConfig", KINDS[name])
    assert tokens(load(quantised, pattern=PATTERN)) == tokens(load(plain, pattern=PATTERN))


LAYOUTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "fused projections": ("Phi3Config", {"pad_token_id": 0}, r".*_proj\.weight"),
    "tied embeddings": ("LlamaConfig", {"tie_word_embeddings": True}, r".*_proj\.weight"),
    "biases": ("Qwen2Config", {}, r".*_proj\.weight"),
    "a head": ("LlamaConfig", {}, r".*(_proj|lm_head)\.weight"),
    "some layers": ("LlamaConfig", {}, r".*layers\.1\..*_proj\.weight"),
    "experts": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
        },
        r".*_proj\.weight",
    ),
}


@pytest.mark.parametrize(("layout", "name"), crossed(list(LAYOUTS), ["gptq", "fp8 tensor"]))
def test_layouts_of_models(layout: str, name: str, tmp_path: Path) -> None:
    config, fields, names = LAYOUTS[layout]
    plain, quantised = twins(tmp_path, config, KINDS[name], names, **fields)
    assert tokens(load(quantised)) == tokens(load(plain))


def test_each_group_of_layers_has_its_own_encoding(tmp_path: Path) -> None:
    kinds = KINDS["packed"], KINDS["float channel"]
    plain, first = twins(tmp_path, "LlamaConfig", kinds[0], r".*layers\.0\..*_proj\.weight")
    both = write_twins(plain, tmp_path / "both", kinds[1], names=r".*layers\.1\..*_proj\.weight")
    stored = {**load_file(both / "model.safetensors")}
    packed = {n: t for n, t in load_file(first / "model.safetensors").items() if ".layers.0." in n}
    stored = {n: t for n, t in stored.items() if ".layers.0." not in n} | packed
    save_file(stored, both / "model.safetensors", {"format": "pt"})
    groups = {
        str(number): {
            **kind.config["config_groups"]["group_0"],
            "format": kind.config["format"],
            "targets": [target],
        }
        for number, (kind, target) in enumerate(zip(kinds, (r"re:.*layers\.0\.", "Linear"), strict=True))
    }
    mixed = {"format": "mixed-precision", "config_groups": groups}
    set_config(both, {**kinds[0].config, **mixed})
    assert_same_weights(plain, both)


def twins_in_mxfp4(directory: Path) -> tuple[Path, Path]:
    """A gpt-oss checkpoint with plain experts, and one with their codes."""
    plain, quantised = directory / "plain", directory / "quantised"
    config = FAMILIES["gpt_oss"]()
    config.intermediate_size = 64
    save_random(config, plain)
    shutil.copytree(plain, quantised)
    stored, rng = load_file(plain / "model.safetensors"), np.random.default_rng(0)
    tensors = dict(stored)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, k, n = stored.pop(name).shape
        written, weight = mxfp4(rng, num_experts, n, k)
        tensors[name] = torch.from_numpy(weight)
        stored |= {f"{name}{end}": each for end, each in written.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    set_config(quantised, {"quant_method": "mxfp4", "modules_to_not_convert": ignored})
    return plain, quantised


@pytest.mark.skipif(not IS_5, reason="gpt-oss keeps its experts in other modules before transformers 5")
def test_experts_in_mxfp4(tmp_path: Path) -> None:
    plain, quantised = twins_in_mxfp4(tmp_path)
    assert tokens(load(quantised)) == tokens(load(plain))


def test_tensors_of_a_weight_may_be_in_several_files_and_what_is_about_keys_is_not_read(
    tmp_path: Path,
) -> None:
    plain, quantised = twins(tmp_path, "LlamaConfig", KINDS["packed zeros"])
    stored = load_file(quantised / "model.safetensors")
    (quantised / "model.safetensors").unlink()
    stored |= {
        f"model.layers.{n}.self_attn.{end}": torch.ones(1) for n in (0, 1) for end in ("k_scale", "v_scale")
    }
    for number in range(3):
        part = {name: tensor for place, (name, tensor) in enumerate(stored.items()) if place % 3 == number}
        save_file(part, quantised / f"model-{number}.safetensors", {"format": "pt"})
    assert_same_weights(plain, quantised)


@pytest.mark.parametrize(
    ("beside", "name"),
    [("hf_quant_config.json", "modelopt"), ("quantize_config.json", "gptq"), ("quant_config.json", "awq")],
)
def test_a_file_of_the_producer_takes_the_place_of_the_field(beside: str, name: str, tmp_path: Path) -> None:
    plain, quantised = twins(tmp_path, "LlamaConfig", KINDS[name])
    file = quantised / "config.json"
    fields = json.loads(file.read_text())
    given = fields.pop("quantization_config")
    file.write_text(json.dumps(fields))
    del given["quant_method"]
    given = {"quantization": given, "producer": {"name": "modelopt"}} if name == "modelopt" else given
    (quantised / beside).write_text(json.dumps(given))
    assert_same_weights(plain, quantised)


def test_the_fingerprint_of_a_model_has_the_file_of_the_producer(tmp_path: Path) -> None:
    _, quantised = twins(tmp_path, "LlamaConfig", KINDS["gptq"])
    without = model_fingerprint(quantised)
    found = {without}
    for layout in ("gptq", "gptq_v2"):
        (quantised / "quantize_config.json").write_text(json.dumps({"checkpoint_format": layout}))
        found.add(model_fingerprint(quantised))
    assert len(found) == 3


def test_a_named_producer_has_to_be_that_of_the_checkpoint(tmp_path: Path) -> None:
    plain, quantised = twins(tmp_path, "LlamaConfig", KINDS["awq"])
    assert load(quantised, quantization="awq", quantization_execution="dequantise").stats()
    with pytest.raises(
        ValueError, match=r"expected weights quantised by gptq, .*, got awq \(quantization_con"
    ):
        load(quantised, quantization="gptq")
    with pytest.raises(ValueError, match=r"expected weights quantised by gptq, .*, got plain weights in "):
        load(plain, quantization="gptq")
    with pytest.raises(ValueError, match=r"expected plain weights, as quantization=int8 says, got awq"):
        load(quantised, quantization="int8")
    with pytest.raises(ValueError, match="one of auto, stored, dequantise, got 'kernels'"):
        load(plain, quantization_execution="kernels")
    assert {*SETTINGS["quantization"].option.choices} == {"auto", INC, *METHODS, *FORMATS}


def test_blocks_of_a_published_size_may_be_larger_than_a_weight(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    kind = Kind(config, fp8("block", "weight_scale_inv", (128, 128)))
    assert_same_weights(*twins(tmp_path, "LlamaConfig", kind))
