"""Families whose keys and values have different sizes: those with latents, which store them, and MiMo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel
from hpu_duo.heads import HeadPattern
from hpu_duo.planning.read_model import read_model
from hpu_duo.sampling import SamplingParams
from kernels_ref import LatentBlocks, LatentSize
from tests.modeling.driving import greedy_logits, teacher_forced
from tests.modeling.families import BASE, BLOCK, LENGTHS, WINDOW, greedy, prompts_of, save_random
from tests.tiers import EXHAUSTIVE

NUM_NEW = 8
KEY, VALUE = 24, 16
"""In the ratio of published sizes, 192 to 128."""
ROUTED: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": KEY - 16,
    "v_head_dim": VALUE,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**ROUTED, **LATENT},
    "mimo_v2_flash": {
        **ROUTED,
        "head_dim": KEY,
        "v_head_dim": VALUE,
        "swa_head_dim": KEY,
        "swa_v_head_dim": VALUE,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "axk1": {**ROUTED, **LATENT},
    "deepseek_v2": {**ROUTED, **LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "glm4_moe_lite": {**ROUTED, **LATENT},
    "longcat_flash": {
        **LATENT,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 2,
        "num_layers": 2,
        "head_dim": 8,
    },
    "minicpm3": LATENT,
    "sarvam_mla": {**ROUTED, **LATENT},
    "youtu": {**LATENT, "tie_word_embeddings": False},
}
FAST = ("deepseek_v3", "mimo_v2_flash")
EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES]
OPTIONS: dict[str, Any] = {"block_size": BLOCK, "max_num_seqs": 4, "max_model_len": 80}


def saved(tmp_path: Path, name: str, **changes: Any) -> Any:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers has {name} from a later version on")
    return save_random(AutoConfig.for_model(name, **{**BASE, **FAMILIES[name], **changes}), tmp_path)


@pytest.mark.parametrize("name", EACH)
def test_logits_of_chunked_prompts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name)
    for options in ({"attention": "reference", "max_num_batched_tokens": 13}, {"max_num_batched_tokens": 96}):
        served = HPUDuoModel.from_pretrained(tmp_path, **{**OPTIONS, "max_num_seqs": len(LENGTHS)}, **options)
        found = greedy_logits(served.engine, prompts_of(), NUM_NEW)
        for prompt, (new, logits) in zip(prompts_of(), found):
            torch.testing.assert_close(logits, teacher_forced(model, prompt, new), atol=1e-4, rtol=0)
        store = served.engine.runner.store
        assert {(layer.head_dim, layer.value_dim) for layer in store.plan.layers} == {(KEY, VALUE)}
        assert store.num_bytes == store.plan.total_bytes
        assert not any("stored expanded" in note for note in served.stats().notes)
        has_latents = "kv_lora_rank" in FAMILIES[name]
        for layer, units in zip(store.plan.layers, store.layers):
            assert isinstance(layer.groups[0].kind, LatentBlocks) == has_latents
            if has_latents:
                assert sum(each.nbytes for each in units[0].tensors) == 4 * (16 + 8) * BLOCK * (
                    store.plan.num_blocks + 1
                )


def test_sizes_are_read_without_weights_where_experts_loop_over_those_that_are_chosen(
    tmp_path: Path,
) -> None:
    AutoConfig.for_model("longcat_flash", **{**BASE, **FAMILIES["longcat_flash"]}).save_pretrained(tmp_path)
    size = read_model(tmp_path)
    assert [layer.latent for layer in size.layers] == [LatentSize(16, KEY - 16)] * 4
    assert (size.experts.num_experts, size.experts.num_per_token) == (4, 2)


@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        *((name, "replay") for name in FAST),
        *(pytest.param(name, "compile", marks=EXHAUSTIVE) for name in FAST),
    ],
)
def test_captured_steps_prefixes_and_samples_have_the_same_tokens(
    tmp_path: Path, name: str, graphs: str
) -> None:
    model = saved(tmp_path, name)
    backend: Any = CompileBackend("eager") if graphs == "compile" else graphs
    served = HPUDuoModel.from_pretrained(
        tmp_path, graphs=backend, max_num_batched_tokens=13, num_prefix_snapshots=4, **OPTIONS
    )
    prompts = prompts_of([20, 1, 40])
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, n=2)
    for _ in range(2):
        for prompt, samples in zip(prompts, served.engine.generate(prompts, params)):
            assert [sample.token_ids for sample in samples] == [greedy(model, prompt, NUM_NEW)] * 2
    prefixes = served.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_hit_tokens > 0


def test_a_saved_context_and_stored_codes_have_both_sizes(tmp_path: Path) -> None:
    saved(tmp_path, "mimo_v2_flash", layer_types=["full_attention"] * 4)
    served = HPUDuoModel.from_pretrained(tmp_path, kv_cache_dtype="k8v4", attention="reference", **OPTIONS)
    prompt, rest = prompts_of([40, 2])
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    alone = served.engine.generate([[*prompt, *rest]], params)
    with served.prefill(prompt) as context:
        context.save(tmp_path / "context")
    again = HPUDuoModel.from_pretrained(tmp_path, kv_cache_dtype="k8v4", attention="reference", **OPTIONS)
    with again.load_context(tmp_path / "context"):
        found = again.engine.generate([[*prompt, *rest]], params)
    assert [each.token_ids for [each] in found] == [each.token_ids for [each] in alone]
    prefixes = again.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_hit_tokens == len(prompt)
    store = again.engine.runner.store
    # A key: 8 bits an element and a scale of 16; a value: 4 bits an element and two numbers of 16.
    assert store.plan.layers[0].token_bytes(store.plan.layers[0].groups[0], 4) == KEY + 2 + VALUE // 2 + 4
    assert store.num_bytes == store.plan.total_bytes


def test_head_patterns_move_heads_of_both_sizes(tmp_path: Path) -> None:
    model = saved(tmp_path, "mimo_v2_flash", layer_types=["full_attention"] * 4)
    # Rings that hold whole requests: heads change places, and nothing else changes.
    pattern = HeadPattern(np.array([[0.0, 1.0]] * 4), sink=2, recent=70).binarise(threshold=0.5)
    served = HPUDuoModel.from_pretrained(tmp_path, pattern=pattern, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    prompts = prompts_of([1, 40])
    for prompt, [sample] in zip(prompts, served.engine.generate(prompts, params)):
        assert sample.token_ids == greedy(model, prompt, NUM_NEW)


def test_triton_kernels_are_refused_by_the_sizes(tmp_path: Path) -> None:
    saved(tmp_path, "mimo_v2_flash")
    with pytest.raises(ValueError, match="keys of 24 and values of 16 elements"):
        HPUDuoModel.from_pretrained(tmp_path, attention="triton", **OPTIONS)
