"""A model that cannot be served is refused at load, and the message says what is missing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    LlavaConfig,
    OlmoeConfig,
    PhimoeConfig,
    PretrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from bias_builders import Window
from hpu_duo import HPUDuoModel
from hpu_duo.modeling.attention import NAME, Probe, attending
from hpu_duo.modeling.loading import build_without_weights, load_model, read_config
from hpu_duo.modeling.probe import look_through, probe, read_layers, read_window, try_flat_batch
from kernels_ref import Blocks, Rings
from tests.modeling.driving import teacher_forced
from tests.modeling.families import (
    BASE,
    BLOCK,
    IS_5,
    VERSION,
    WINDOW,
    is_known,
    make_config,
    prompts_of,
    save_random,
)
from tests.modeling.test_value_sizes import LATENT, ROUTED

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

OWN_CLASSES = "attention classes of its own"
FROM_5 = pytest.mark.skipif(not IS_5, reason="refused with transformers before 5, as shown above")

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "state_space": ("MambaConfig", {}, "Mamba.*cannot be served"),
    "state_space_falcon": (
        "FalconMambaConfig",
        {},
        r"FalconMambaMixer \(mamba_selective_scan, mamba_selective_state_update\)"
        if IS_5
        else "FalconMamba.*cannot be served",
    ),
    "states_only": (
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
        r"a layer that attends, got states only \(Mamba2Mixer\)" if IS_5 else "cannot be served",
    ),
    "state_space_and_attention": (
        "JambaConfig",
        {**EXPERTS, "use_mamba_kernels": False},
        "one attention call in each",
    ),
    "recurrence_and_attention": ("RecurrentGemmaConfig", {}, "one attention call in each"),
    "recurrence": ("RwkvConfig", {}, "cannot be served"),
    "chosen_keys_beside_recurrences": (
        "Qwen4ExpTextConfig",
        {
            **EXPERTS,
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "shared_expert_intermediate_size": 24,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
        "keys that a model chooses are not supported: Qwen4ExpTextQSAIndexer",
    ),
    "sizes_of_single_layers": (
        "Dots3NoteTextConfig",
        {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
        "dots3_note_text.* cannot be served: expected one num_attention_heads for all layers",
    ),
    "chunked_attention": ("Llama4TextConfig", EXPERTS, "chunked_attention"),
    "two_attentions_in_a_layer": (
        "DiffLlamaConfig",
        {},
        "8 calls of 4 attention modules" if IS_5 else OWN_CLASSES,
    ),
    "biases_by_distance_in_classes_of_its_own": (
        "FalconConfig",
        {"alibi": True},
        "falcon.*attention classes",
    ),
    "attention_classes_of_its_own": (
        "GPTNeoConfig",
        {"attention_types": [[["global"], 4]]},
        "gpt_neo.*attention classes",
    ),
    "biases_by_distance": ("MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 4}, "cannot be served"),
    "biases_by_distance_from_the_mask": ("BloomConfig", {}, "cannot be served"),
    "no_positions": ("OpenAIGPTConfig", {}, "cannot be served"),
    "looks_ahead": ("BertConfig", {"is_decoder": False}, "cannot be served"),
    "positions_counted_from_padding": (
        "RobertaConfig",
        {"is_decoder": True},
        "flat batch" if IS_5 else OWN_CLASSES,
    ),
    "attention_that_adds_its_mask": (
        "RemBertConfig",
        {"is_decoder": True},
        "attend by code of their own" if IS_5 else OWN_CLASSES,
    ),
    "rotated_attention_of_its_own": (
        "RoFormerConfig",
        {"is_decoder": True},
        "attend by code of their own" if IS_5 else OWN_CLASSES,
    ),
    "sparse_attention_of_its_own": (
        "BigBirdConfig",
        {"is_decoder": True},
        "attend by code of their own" if IS_5 else OWN_CLASSES,
    ),
    "layers_that_run_in_rounds": (
        "HrmTextConfig",
        {},
        "each attention module to be called once.*got 32 calls of 8 attention modules",
    ),
    "masks_by_content": ("DogeConfig", {}, "a mask of its own"),
    "masks_by_content_beyond_the_trial": (
        "DogeConfig",
        {"keep_window_size": 2048},
        "a mask of its own",
    ),
}
if not IS_5:
    REFUSED |= {
        "stablelm": ("StableLmConfig", {}, OWN_CLASSES),
        "olmoe": ("OlmoeConfig", EXPERTS, OWN_CLASSES),
        "phimoe": ("PhimoeConfig", EXPERTS, OWN_CLASSES),
    }


@pytest.mark.parametrize("name", [name for name, (of_class, *_) in REFUSED.items() if is_known(of_class)])
def test_architectures_that_cannot_be_served_are_refused(tmp_path: Path, name: str) -> None:
    of_class, changes, message = REFUSED[name]
    save_random(make_config(of_class, **{**BASE, **changes}), tmp_path)
    with pytest.raises(ValueError, match=message):
        HPUDuoModel.from_pretrained(tmp_path, max_model_len=64, max_num_seqs=2, block_size=BLOCK)


_INDEXER = {"head_dim": 8, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
_SHARED_BLOCKS = {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 8}
_ASSISTANT = {
    "text_config": {
        **BASE,
        **dict.fromkeys(("hidden_size_per_layer_input", "vocab_size_per_layer_input"), 0),
        **dict.fromkeys(("head_dim", "global_head_dim"), 8),
    }
}
_LOOP = {"loop_layer_index_start": 1, "loop_layer_index_end": 3, "n_layers_per_attn_res_block": 1}

FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "kimi_linear": (
        {**LATENT, **EXPERTS, "linear_head_dim": 8, "linear_num_heads": 4},
        r"KimiLinearDeltaAttention \(chunk_kimi_delta_attention, recurrent_kimi_delta_attention\)",
    ),
    "bailing_hybrid": (
        {**LATENT, **EXPERTS, "head_dim": 8, "n_group": 1, "topk_group": 1, "layer_group_size": 2},
        r"BailingHybridDeltaAttention \(chunk_kimi_delta_attention, recurrent_kimi_delta_attention\)",
    ),
    "jamba": (EXPERTS, r"JambaMambaMixer \(mamba_selective_scan, mamba_selective_state_update\)"),
    "zamba": (_SHARED_BLOCKS, r"ZambaMambaMixer \(mamba_selective_scan, mamba_selective_state_update\)"),
    "zamba2": (
        {**_SHARED_BLOCKS, "mamba_headdim": 8, "mamba_ngroups": 1},
        "layers.1.shared_transformer', a part of a layer, whose weights other layers may share",
    ),
    "zaya": (
        {**EXPERTS, "num_experts_per_tok": 1, "head_dim": 8, "router_hidden_size": 16},
        "ZayaCCAProjection cannot be served.*expected one convolution",
    ),
    "minimax": ({**EXPERTS, "head_dim": 8}, "MiniMaxLightningAttention"),
    "recurrent_gemma": ({}, "RecurrentGemmaRecurrentBlock"),
    "mamba": ({}, r"MambaMixer \(mamba_selective_scan, mamba_selective_state_update\)"),
    "falcon_mamba": ({}, r"FalconMambaMixer \(mamba_selective_scan, mamba_selective_state_update\)"),
    "mamba2": (
        {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
        r"a layer that attends, got states only \(Mamba2Mixer\)",
    ),
    "rwkv": ({}, "states of recurrences .* RwkvSelfAttention"),
    "xlstm": ({"num_heads": 4}, "states of recurrences .* xLSTMLayer"),
    "dory": (
        {"num_hidden_layers": 6, "n_input_layers": 2, "n_output_layers": 2, "sliding_window": WINDOW},
        "each attention module to be called once for a token, got 8 calls of 6",
    ),
    "hrm_text": ({}, "each attention module to be called once for a token, got 32 calls of 8"),
    "inkling2_loop_text": (
        {**EXPERTS, **_LOOP, "head_dim": 8, "swa_head_dim": 8, "n_routed_experts": 4, "d_rel": 4},
        "Inkling2LoopShortConvolution cannot be served",
    ),
    "deepseek_v32": ({**ROUTED, **LATENT, **_INDEXER}, "keys that a model chooses .* DeepseekV32Indexer"),
    "glm_moe_dsa": ({**ROUTED, **LATENT, **_INDEXER}, "keys that a model chooses .* GlmMoeDsaIndexer"),
    "hy_v4": ({**ROUTED, **LATENT, **_INDEXER}, "keys that a model chooses .* HYV4Indexer"),
    "axk2": ({**ROUTED, **LATENT, **_INDEXER}, "keys that a model chooses .* AXK2Indexer"),
    "deepseek_v4": (
        {**ROUTED, **_INDEXER, "num_key_value_heads": 1, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8},
        "keys that a model chooses .* DeepseekV4Indexer",
    ),
    "minimax_m3_vl_text": (
        {**EXPERTS, **_INDEXER, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "rotary_dim": 4},
        "keys that a model chooses .* MiniMaxM3VLIndexer",
    ),
    "gemma4_assistant": (_ASSISTANT, "shared_kv_states cannot be None"),
    "gemma4_unified_assistant": (_ASSISTANT, "shared_kv_states cannot be None"),
    "glm5_next": ({"text_config": {}}, "'glm5_next' has no causal language model"),
    "mistral4": ({}, "'mistral4' has no causal language model"),
    "mistral_large4": ({}, "'mistral_large4' has no causal language model"),
}
"""Model types that are refused before weights are read, with the part that is missing.

``REFUSED`` has qwen4_exp and dots3_note.
"""


@pytest.mark.skipif(VERSION < (5, 24), reason="families and names of their parts are those of 5.24")
@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_refused_with_the_part_that_is_missing(tmp_path: Path, name: str) -> None:
    changes, message = FAMILIES[name]
    base = {} if "text_config" in changes else BASE
    AutoConfig.for_model(name, **{**base, **changes}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_layers(
            build_without_weights(tmp_path, read_config(tmp_path, needs_weights=False), torch.float32)
        )


@pytest.mark.parametrize("max_model_len", [None, 64])
@pytest.mark.parametrize("of_class", ["MambaConfig", "BloomConfig", "RecurrentGemmaConfig", "XLNetConfig"])
def test_what_is_missing_is_attention_and_not_a_number_of_positions(
    tmp_path: Path, of_class: str, max_model_len: int | None
) -> None:
    fields = {name: value for name, value in BASE.items() if name != "max_position_embeddings"} | {
        "d_head": 8
    }
    save_random(make_config(of_class, **fields), tmp_path)
    with pytest.raises(ValueError, match="cannot be served: expected one attention call in each") as refusal:
        HPUDuoModel.from_pretrained(tmp_path, max_model_len=max_model_len, max_num_seqs=2, block_size=BLOCK)
    assert "position" not in str(refusal.value)


def test_a_deep_chaotic_mixture_of_experts_in_bfloat16_is_not_refused(tmp_path: Path) -> None:
    """Its logits in bfloat16 depend on the order of summation; the trial must not mistake that for a flaw."""
    config = GptOssConfig(**{**BASE, **EXPERTS, "num_hidden_layers": 12, "head_dim": 8, "rope_scaling": None})
    model = save_random(config, tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    served = HPUDuoModel.from_pretrained(
        tmp_path, dtype="bfloat16", max_model_len=64, max_num_seqs=2, block_size=BLOCK
    )
    assert {p.dtype for p in served.engine.runner.model.model.parameters()} <= {torch.bfloat16}
    assert served.generate([[5, 6, 7]], max_new_tokens=4).shape == (1, 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_trial_runs_in_float32_and_widens_one_layer_at_a_time(tmp_path: Path, dtype: torch.dtype) -> None:
    save_random(LlamaConfig(**{**BASE, "num_hidden_layers": 5}), tmp_path)
    model = load_model(tmp_path, read_config(tmp_path), dtype, torch.device("cpu"))
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    layers = list(model.model.layers)
    calls = [layer.call for layer in probe(model)]
    seen = []

    def note(layer: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        wide = [other is layer for other in layers if other.mlp.up_proj.weight.dtype == torch.float32]
        seen.append((layers.index(layer), args[0].dtype, wide))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layers[0]), "forward", noting(type(layers[0]).forward, note))
        try_flat_batch(model, calls)
    assert seen == [(index, torch.float32, [True]) for index in (0, 1, 0, 1)]
    assert list(model.model.layers) == layers
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert {p.dtype for p in model.parameters()} == {dtype}
    with attending(model, Probe()):
        assert model(torch.tensor([[5]])).logits.shape == (1, 1, BASE["vocab_size"])


def noting(forward: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    def noted(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        note(layer, args)
        return forward(layer, *args, **kwargs)

    return noted


@pytest.mark.parametrize("name", ["positions_counted_from_padding", "masks_by_content"])
def test_flaws_show_in_bfloat16_checkpoints_too(tmp_path: Path, name: str) -> None:
    of_class, changes, message = REFUSED[name]
    model = save_random(make_config(of_class, **{**BASE, **changes}), tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        HPUDuoModel.from_pretrained(tmp_path, max_model_len=64, max_num_seqs=2, block_size=BLOCK)


def test_encoder_decoder_models_are_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="encoder-decoder"):
        HPUDuoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("make_sliding", "window"),
    [
        pytest.param(
            lambda: OlmoeConfig(**{**BASE, **EXPERTS, "sliding_window": WINDOW}), None, marks=FROM_5
        ),
        pytest.param(
            lambda: PhimoeConfig(**{**BASE, **EXPERTS, "sliding_window": WINDOW}), WINDOW, marks=FROM_5
        ),
        (lambda: LlamaConfig(**{**BASE, "sliding_window": WINDOW}), None),
    ],
    ids=["told_to_attention_but_not_masked", "masked_but_not_told_to_attention", "neither"],
)
def test_the_window_is_what_is_masked_whatever_the_configuration_says(
    tmp_path: Path, make_sliding: Callable[[], PretrainedConfig], window: int | None
) -> None:
    model = save_random(make_sliding(), tmp_path)
    served = HPUDuoModel.from_pretrained(tmp_path, max_model_len=64, max_num_seqs=2, block_size=BLOCK)
    assert {
        group.kind.without_slack for spec in served.engine.runner.model.specs for group in spec.groups
    } == {Rings(Window(0, window)) if window else Blocks()}
    prompt = prompts_of([30])[0]
    new = served.generate([prompt], max_new_tokens=10)[0, 30:].tolist()
    assert new == teacher_forced(model, prompt, new).argmax(dim=-1).tolist()


def causal(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key <= query


@pytest.mark.parametrize("window", [1, 2, 3, 4096, 131072])
def test_looking_through_a_mask_rule_finds_its_window(window: int) -> None:
    def sliding(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return causal(batch, head, query, key) & (key > query - window)

    def chunked(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return causal(batch, head, query, key) & (key // (2 * window) == query // (2 * window))

    assert look_through(sliding) == window
    assert look_through(chunked) < 0


def test_looking_through_a_mask_rule_tells_full_attention_from_attention_that_looks_ahead() -> None:
    assert look_through(causal) == float("inf")
    assert look_through(lambda batch, head, query, key: key <= query + 3) < 0
    assert look_through(lambda batch, head, query, key: key < query) < 0


def test_only_the_very_mask_that_was_returned_shows_a_window() -> None:
    marker = AttentionMaskInterface()[NAME](mask_function=causal)
    assert read_window(marker) == float("inf")
    for changed in (marker + torch.zeros(1, 4, 1, 1), marker * 1, marker.clone(), marker[..., :1], None):
        assert read_window(changed) is None


def test_models_that_are_served_stay_on_our_attention_after_the_trial(tmp_path: Path) -> None:
    save_random(LlamaConfig(**BASE), tmp_path)
    served = HPUDuoModel.from_pretrained(tmp_path, max_model_len=64, max_num_seqs=2, block_size=BLOCK)
    assert served.engine.runner.model.model.config._attn_implementation == "hpu_duo"


def test_multimodal_configurations_are_refused(tmp_path: Path) -> None:
    text = LlamaConfig(**BASE)
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    vision["model_type"] = "clip_vision_model"
    config = LlavaConfig(text_config=text.to_dict(), vision_config=vision)
    AutoModelForCausalLM.from_config(text).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="llava"):
        HPUDuoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, value: float) -> None:
    model = save_random(LlamaConfig(**BASE), tmp_path)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = value
        model.model.layers[1].mlp.up_proj.weight[0, 0] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"finite weights, got NaN .*layers\.0\.mlp\.up_proj.* 1 more"
    ) as refusal:
        HPUDuoModel.from_pretrained(tmp_path)
    assert "masks" not in str(refusal.value)
