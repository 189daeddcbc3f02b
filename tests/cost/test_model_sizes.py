"""Sizes from a config.json against the models that transformers makes of the same configuration."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.heads import HeadPattern
from hpu_duo.kv.plan import LayerKV, MemoryPlan
from hpu_duo.planning import AttentionSize, Experts, Format, ModelSize
from hpu_duo.planning.fit import dense_model, published_rows
from hpu_duo.planning.read_model import _by_transformers, read_model, read_plain
from kernels_ref import Owner
from tests.cost.sizes import LLAMA_3_1_8B, models, tiny
from tests.modeling.families import FAMILIES


def save(config: PretrainedConfig, directory: Path) -> Path:
    config.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_of_a_family_is_counted_once(name: str, tmp_path: Path) -> None:
    config = FAMILIES[name]()
    size = read_model(save(config, tmp_path))
    model = AutoModelForCausalLM.from_config(config)
    assert size.num_params == model.num_parameters()
    assert size.weight_bytes(Format.BF16) == 2 * model.num_parameters()
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    if not size.experts.num_params and name != "gpt2":
        assert size.matrix_params + size.head_params == linear


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_are_apart_from_what_every_token_reads(name: str, tmp_path: Path) -> None:
    config = FAMILIES[name]()
    experts = read_model(save(config, tmp_path)).experts
    assert (experts.num_experts, experts.num_per_token) == (4, 2)
    assert experts.share_read(1) == pytest.approx(0.5)
    assert experts.share_read(10_000) == pytest.approx(1.0)
    model = AutoModelForCausalLM.from_config(config)
    counted = sum(
        parameter.numel() for path, parameter in model.named_parameters() if "experts" in path.split(".")
    )
    assert experts.num_params == counted


def counted(config: PretrainedConfig, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[ModelSize]:
    """Sizes by formula, and by transformers' model."""
    save(config, directory)
    by_formula = read_model(directory)
    with monkeypatch.context() as patched:
        patched.setattr("hpu_duo.planning.read_model.read_plain", lambda _: None)
        patched.setattr("hpu_duo.planning.read_model.plain_model", lambda *_: None)
        return [by_formula, read_model(directory)]


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
    ],
    ids=str,
)
def test_a_formula_counts_what_the_model_of_transformers_has(
    kind: type[PretrainedConfig], changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 100}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    by_formula, by_model = counted(kind(**sizes, **heads, **changes), tmp_path, monkeypatch)
    assert by_formula == by_model


# No file has all of these; one or two of them are changed at a time.
CHANGES: dict[str, tuple[Any, ...]] = {
    "head_dim": (None, 16, 7, True),
    "num_key_value_heads": (8, 3, None, 2.0),
    "hidden_size": (72, 65, "64"),
    "hidden_act": ("gelu", "none", None),
    "sliding_window": (16, None, 0),
    "use_sliding_window": (True, False),
    "layer_types": (None, ["full_attention"] * 3, ["sliding_attention"] * 3, ["full_attention"]),
    "rope_parameters": (None, {"rope_type": "yarn", "factor": 2.0}, {"rope_type": "llama3"}, {"type": "x"}),
    "rope_scaling": ({"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "none"}),
    "tie_word_embeddings": (True, None),
    "attention_bias": (True, "yes"),
    "eos_token_id": ([1, 2], ["a"], -1),
    "initializer_range": (5.0,),
    "dtype": ("bfloat16", "int3"),
    "auto_map": ({},),
    "kv_lora_rank": (8,),
    "max_position_embeddings": (0, 4096),
}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_file_is_read_as_transformers_reads_it_and_refused_where_it_is(data: st.DataObject) -> None:
    kinds: list[Any] = [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config]
    kind = data.draw(st.sampled_from(kinds))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 100}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    fields = {**kind(**sizes, **heads).to_diff_dict(), "architectures": [], "model_type": kind.model_type}
    for name in data.draw(st.lists(st.sampled_from(sorted(CHANGES)), max_size=2)):
        fields[name] = data.draw(st.sampled_from(CHANGES[name]))
    with TemporaryDirectory() as directory:
        file = Path(directory) / "config.json"
        file.write_text(json.dumps(fields))
        assert outcome(read_model, file) == outcome(partial(_by_transformers, Path(directory).name), file)


def outcome(read: Callable[[Path], ModelSize], file: Path) -> ModelSize | str:
    try:
        return read(file)
    except ValueError as error:
        return str(error)


def test_common_files_are_read_without_transformers(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (LlamaConfig, {}),
        (MistralConfig, {"sliding_window": None}),
        (Qwen2Config, {}),
        (Qwen3Config, {}),
    ]
    for kind, changes in kinds:
        assert read_plain(save(kind(**sizes, **changes), tmp_path) / "config.json") is not None
    assert read_plain(MODEL_DIR / "config.json") is not None
    assert read_plain(save(MistralConfig(**sizes), tmp_path) / "config.json") is None, "it has a window"


QUANTISED = {
    "no bits": ({"quant_method": "gptq"}, "expected bits to be 2, 4, 8 .*, got None"),
    "another method": ({"quant_method": "hqq"}, "got hqq .*: load the checkpoint that they were made from"),
    "no groups": (
        {"quant_method": "compressed-tensors"},
        "expected config_groups to be an object .*, got None",
    ),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_weights_that_are_quantised_in_a_way_that_is_not_read_are_refused(kind: str, tmp_path: Path) -> None:
    file = save(FAMILIES["llama"](), tmp_path) / "config.json"
    fields, message = QUANTISED[kind]
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": fields}))
    with pytest.raises(ValueError, match=message):
        read_model(file)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_sizes_of_quantised_weights_are_those_of_the_plain_ones_they_become(
    family: str, tmp_path: Path
) -> None:
    file = save(FAMILIES[family](), tmp_path) / "config.json"
    plain = read_model(file)
    fields = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": fields}))
    assert read_model(file) == plain


def test_what_says_that_weights_are_quantised_may_be_another_file_or_in_the_text_model(
    tmp_path: Path,
) -> None:
    file = save(FAMILIES["llama"](), tmp_path) / "config.json"
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text("{}")
    with pytest.raises(ValueError, match=r"expected quant_algo to be FP8 in the file .*hf_quant_config.json"):
        read_model(tmp_path)
    beside.unlink()
    read_model(tmp_path)
    told = {"text_config": {"quantization_config": {"load_in_4bit": True}}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **told}))
    with pytest.raises(ValueError, match="got a method that it does not name"):
        read_model(tmp_path)


@pytest.mark.parametrize("has_base", [True, False])
def test_an_adapter_is_refused_with_its_base_and_how_to_merge_it(has_base: bool, tmp_path: Path) -> None:
    if has_base:
        save(FAMILIES["llama"](), tmp_path)
    fields = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"got a LORA adapter of org/base .*merge_and_unload"):
        read_model(tmp_path)


def test_a_gguf_file_alone_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_K_M.gguf").touch()
    with pytest.raises(ValueError, match=r"got the GGUF file .*Q4_K_M"):
        read_model(tmp_path)


def test_windows_are_those_of_the_layers(tmp_path: Path) -> None:
    sliding = read_model(save(FAMILIES["mistral_sliding"](), tmp_path / "a"))
    partly = read_model(save(FAMILIES["qwen2_partly_sliding"](), tmp_path / "b"))
    full = read_model(save(FAMILIES["mistral"](), tmp_path / "c"))
    assert [layer.window for layer in sliding.layers] == [11] * 4
    assert [layer.window for layer in partly.layers] == [None, None, 11, 11]
    assert [layer.window for layer in full.layers] == [None] * 4


def test_llama_3_1_8b_has_the_bytes_that_a_start_up_log_shows(tmp_path: Path) -> None:
    """14.97 GiB of weights, 16 MiB per block of 128: documentation of vllm-gaudi, Gaudi 2, bf16."""
    size = read_model(save(LlamaConfig(**LLAMA_3_1_8B), tmp_path / "Llama-3.1-8B"))
    assert size.name == "Llama-3.1-8B"
    assert size.num_params == 8_030_261_248
    assert size.weight_bytes(Format.BF16) / 2**30 == pytest.approx(14.97, abs=0.02)
    assert size.max_positions == 131_072


@pytest.mark.slow
def test_models_of_published_rows_are_those_of_their_configurations(tmp_path: Path) -> None:
    for row in {row.model.name: row for row in published_rows()}.values():
        size, first = row.model, row.model.layers[0]
        layers = len(size.layers)
        attention = 2 * size.hidden_size * first.head_dim * (first.num_heads + first.num_kv_heads)
        config = LlamaConfig(
            hidden_size=size.hidden_size,
            intermediate_size=(size.matrix_params // layers - attention) // (3 * size.hidden_size),
            num_hidden_layers=layers,
            num_attention_heads=first.num_heads,
            num_key_value_heads=first.num_kv_heads,
            vocab_size=size.vocab_size,
            max_position_embeddings=size.max_positions,
        )
        assert read_model(save(config, tmp_path / size.name)) == size


def test_published_models_have_the_parameters_that_their_names_promise() -> None:
    billions = {row.model.name: row.model.num_params / 1e9 for row in published_rows()}
    assert billions == pytest.approx(
        {
            "Llama-2-7B": 6.74,
            "Llama-2-13B": 13.02,
            "Llama-2-70B": 68.98,
            "Llama-3.1-8B": 8.03,
            "Llama-3.1-70B": 70.55,
            "Mistral-7B": 7.24,
        },
        abs=0.01,
    )


def test_layers_of_other_modules_have_another_structure(tmp_path: Path) -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    found = read_model(save(Qwen3MoeConfig(**sizes, **moe, vocab_size=64), tmp_path))
    assert found.structures == (0, 1, 0)
    assert found.num_kinds(found.kv_layers(0.0, 0, 1, 100)) == 2


@given(models(), st.floats(0, 1), st.integers(0, 64), st.integers(1, 256), st.integers(1, 4000))
def test_as_many_heads_stream_as_a_head_pattern_would_have(
    model: ModelSize, sparsity: float, sink: int, recent: int, max_len: int
) -> None:
    kept = model.kv_layers(sparsity, sink, recent, max_len)
    for layer, kv in zip(model.layers, kept, strict=True):
        assert kv.num_heads == layer.num_kv_heads
        if layer.window is not None:
            assert num_streaming(kv) == (layer.num_kv_heads if layer.window < max_len else 0)
        if num_streaming(kv):
            ring = min(sink + recent, max_len) if layer.window is None else layer.window
            assert kv.groups[-1].kind.reach == ring
    full = [kv for layer, kv in zip(model.layers, kept) if layer.window is None]
    num_full = sum(kv.num_heads for kv in full)
    if num_full:
        pattern = HeadPattern.random(1, num_full, seed=0).binarise(sparsity=sparsity)
        assert num_full - sum(map(num_streaming, full)) == int(pattern.mask.sum())


@pytest.mark.parametrize(
    ("family", "num_stores", "per_layer"), [("gemma3n_text", 20, 4 * 256), ("deepseek_v3", 61, 128 * 320)]
)
def test_shared_keys_and_latents_are_counted_as_they_are_stored(
    tmp_path: Path, family: str, num_stores: int, per_layer: int
) -> None:
    """Gemma 3n has 35 layers of 20 stores; a latent of 576 replaces 128 heads of 192 and 128 elements."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers has {family} from a later version on")
    size = read_model(save(AutoConfig.for_model(family), tmp_path / family))
    layers = size.kv_layers(0.0, 0, 512, 4096)
    assert len(set(size.sources)) == sum(layer.source is None for layer in layers) == num_stores
    sizes: dict[str, Any] = {"dtype_bytes": 2, "block_size": 128, "max_num_seqs": 4, "num_blocks": 8}
    assert MemoryPlan(size.kv_layers(0.5, 4, 60, 4096), **sizes).uses_rows, "readers have the heads of stores"
    plan = MemoryPlan(layers, **sizes)
    alone = replace(plan, layers=tuple(replace(layer, source=None) for layer in layers))
    assert plan.full_attention_bytes(1) == num_stores * per_layer * 2
    assert alone.full_attention_bytes(1) == len(layers) * per_layer * 2
    assert plan.total_bytes * len(layers) <= alone.total_bytes * num_stores * 1.02
    if family == "deepseek_v3":
        assert plan.bytes_per_request(128) == num_stores * 128 * 576 * 2


def num_streaming(layer: LayerKV) -> int:
    return sum(group.num_heads for group in layer.groups if group.kind.owner is Owner.ROW)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "expected config.json"),
        ("{", "cannot read"),
        ('{"model_type": "no_such_model"}', "cannot read"),
        ('{"architectures": ["X"]}', "cannot read"),
        (T5Config(), "encoder-decoder"),
        (LlamaConfig(num_attention_heads=3, num_key_value_heads=2, hidden_size=24), "multiple of 2 KV heads"),
        ('{"model_type": "mamba"}', "cannot size"),
        ('{"model_type": "vit"}', "no causal language model"),
    ],
)
def test_a_configuration_that_cannot_be_sized_is_refused(
    tmp_path: Path, content: Any, complaint: str
) -> None:
    if isinstance(content, PretrainedConfig):
        content = json.dumps(content.to_diff_dict())
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=complaint):
        read_model(tmp_path)


def test_bytes_of_quantised_weights_have_their_scales() -> None:
    size = dense_model(
        "Llama-3-8B",
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=128256,
    )
    assert size.weight_bytes(Format.INT8) == size.weight_bytes(Format.FP8) == 9_083_953_152
    in_layers = size.matrix_params
    assert (
        size.weight_bytes(Format.BF16) - size.weight_bytes(Format.INT4)
        == in_layers * 3 // 2 - in_layers // 64
    )


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 3 KV heads"):
        AttentionSize(8, 3, 64)
    with pytest.raises(ValueError, match="window of 1 token"):
        AttentionSize(8, 4, 64, window=0)
    with pytest.raises(ValueError, match="num_per_token <= num_experts"):
        Experts(10, 4, 5)
    with pytest.raises(ValueError, match="at least one layer"):
        tiny(layers=())
    with pytest.raises(ValueError, match="matrix_params >= 1"):
        tiny(matrix_params=0)
    with pytest.raises(ValueError, match="divides 2 KV heads, got 4"):
        tiny().check_split(4)
    with pytest.raises(ValueError, match="recent >= 1"):
        tiny().kv_layers(0.5, 0, 0, 10)
    with pytest.raises(ValueError, match="format bf16, fp8, int8 or int4"):
        Format.parse("int3")
    assert Format.parse("bfloat16") is Format.BF16
    with pytest.raises(TypeError):
        dense_model("unknown sizes", layers=3)  # type: ignore[call-arg]
