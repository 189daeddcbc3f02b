"""Rotary embeddings whose frequencies transformers changes with the length of a sequence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, PretrainedConfig

from hpu_duo import HPUDuoModel
from hpu_duo.modeling.config_checks import (
    NoPositionsError,
    fix_frequencies,
    longest_served,
    positions_served,
    served_len,
    short_len,
)
from tests.modeling.driving import greedy_logits, teacher_forced
from tests.modeling.families import (
    BASE,
    BLOCK,
    IS_5,
    LENGTH_DEPENDENT,
    is_known,
    make_config,
    prompts_of,
    save_random,
)

DYNAMIC, LONGROPE = LENGTH_DEPENDENT
ROPES = pytest.mark.parametrize("rope", LENGTH_DEPENDENT, ids=lambda rope: str(rope["rope_type"]))
ROPE_FIELD = "rope_parameters" if IS_5 else "rope_scaling"

SHORT, LONG = 64, 96
"""Lengths up to which short texts go in the models below, and what they say that they serve."""


def config_of(rope: dict[str, Any], **changes: Any) -> PretrainedConfig:
    sizes = {**BASE, "num_hidden_layers": 2, "max_position_embeddings": LONG}
    if rope["rope_type"] == "dynamic":
        sizes["max_position_embeddings"] = SHORT
    else:
        # Before 5, transformers looks for it here.
        sizes["original_max_position_embeddings"] = SHORT
    return LlamaConfig(**{**sizes, ROPE_FIELD: rope, **changes})


def random_model(rope: dict[str, Any]) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(config_of(rope))


@torch.no_grad()
def logits(model: LlamaForCausalLM, length: int) -> torch.Tensor:
    out: torch.Tensor = model(torch.arange(length)[None] % 90 + 3).logits
    return out


@ROPES
@pytest.mark.parametrize("max_len", [40, SHORT])
def test_short_requests_keep_the_frequencies_of_all_short_texts(rope: dict[str, Any], max_len: int) -> None:
    fixed, model = random_model(rope), random_model(rope)
    assert short_len(model.config) == SHORT
    fix_frequencies(fixed, max_len)
    for length in (1, 40, SHORT):
        assert torch.equal(logits(fixed, length), logits(model, length))
    assert not torch.allclose(logits(fixed, SHORT + 8), logits(model, SHORT + 8))


@pytest.mark.parametrize("max_len", [SHORT + 1, LONG])
def test_longrope_takes_the_long_factors_for_every_length_once_requests_may_be_long(max_len: int) -> None:
    fixed, model = random_model(LONGROPE), random_model(LONGROPE)
    fix_frequencies(fixed, max_len)
    for length in (SHORT + 1, SHORT + 20, LONG):
        assert torch.equal(logits(fixed, length), logits(model, length))
    assert not torch.allclose(logits(fixed, SHORT), logits(model, SHORT))


@pytest.mark.parametrize("max_len", [SHORT + 1, LONG, 4 * SHORT])
def test_dynamic_takes_the_frequencies_of_the_longest_request(max_len: int) -> None:
    fixed, model = random_model(DYNAMIC), random_model(DYNAMIC)
    fix_frequencies(fixed, max_len)
    torch.testing.assert_close(logits(fixed, max_len), logits(model, max_len), atol=1e-5, rtol=0)
    assert not torch.allclose(logits(fixed, SHORT), logits(random_model(DYNAMIC), SHORT))


@ROPES
@pytest.mark.parametrize("max_len", [SHORT, LONG])
def test_what_a_model_has_seen_before_does_not_matter(rope: dict[str, Any], max_len: int) -> None:
    fresh, used = random_model(rope), random_model(rope)
    logits(used, LONG + 8)
    for model in (fresh, used):
        fix_frequencies(model, max_len)
    assert torch.equal(logits(used, 20), logits(fresh, 20))


def test_other_embeddings_are_left_alone() -> None:
    model = random_model({"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0})
    before = model.model.rotary_emb.inv_freq
    fix_frequencies(model, 96)
    assert model.model.rotary_emb.inv_freq is before
    assert model.model.rotary_emb.rope_type == "linear"
    assert short_len(model.config) is None


def test_lengths_that_may_be_asked_for() -> None:
    dynamic, longrope = config_of(DYNAMIC), config_of(LONGROPE)
    assert (positions_served(dynamic), longest_served(dynamic)) == (SHORT, 4 * SHORT)
    assert (positions_served(longrope), longest_served(longrope)) == (LONG, LONG)
    assert served_len(dynamic, None) == SHORT
    assert served_len(dynamic, 4 * SHORT) == 4 * SHORT
    with pytest.raises(ValueError, match=f"max_model_len of at most {4 * SHORT}"):
        served_len(dynamic, 4 * SHORT + 1)
    with pytest.raises(ValueError, match=f"max_model_len of at most {LONG}"):
        served_len(longrope, LONG + 1)


@pytest.mark.skipif(not is_known("PhimoeConfig"), reason="transformers has no such model")
def test_where_a_configuration_says_no_number_of_positions_max_model_len_does() -> None:
    for unlimited in (PretrainedConfig(), PretrainedConfig(max_position_embeddings=-1)):
        assert served_len(unlimited, 64) == 64
        with pytest.raises(NoPositionsError, match="expected max_model_len"):
            served_len(unlimited, None)


def test_a_family_that_scales_by_the_longest_text_of_a_batch_is_served_up_to_its_short_texts() -> None:
    rope = {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}
    fields = {**BASE, "max_position_embeddings": LONG, "original_max_position_embeddings": SHORT}
    config = make_config("PhimoeConfig", **fields, **{ROPE_FIELD: rope})
    assert positions_served(config) == SHORT


def phi3() -> PretrainedConfig:
    """Sizes in the proportions of Phi-3-mini-128K."""
    fields = {**BASE, "num_key_value_heads": 4, "sliding_window": None}
    limits = {"max_position_embeddings": 4 * SHORT, "original_max_position_embeddings": SHORT}
    rope = {key: value for key, value in LONGROPE.items() if key.endswith("_factor")}
    return Phi3Config(**{**fields, **limits}, rope_theta=10_000.0, rope_scaling={**rope, "type": "longrope"})


@pytest.mark.parametrize("max_model_len", [None, SHORT])
@pytest.mark.parametrize("batched_tokens", [13, 512])
def test_phi3_with_longrope_gives_transformers_logits_wherever_both_take_the_same_factors(
    tmp_path: Path, max_model_len: int | None, batched_tokens: int
) -> None:
    model = save_random(phi3(), tmp_path)
    served = HPUDuoModel.from_pretrained(
        tmp_path,
        max_model_len=max_model_len,
        max_num_batched_tokens=batched_tokens,
        max_num_seqs=3,
        block_size=BLOCK,
    )
    longest = 4 * SHORT if max_model_len is None else SHORT
    assert served.engine.limits.max_model_len == longest
    lengths = [SHORT, SHORT + 20, 4 * SHORT - 6] if max_model_len is None else [1, 20, SHORT - 6]
    prompts = prompts_of(lengths)
    for prompt, (new, got) in zip(prompts, greedy_logits(served.engine, prompts, 6)):
        torch.testing.assert_close(got, teacher_forced(model, prompt, new), atol=1e-4, rtol=0)


@pytest.mark.parametrize("max_model_len", [SHORT, LONG, 4 * SHORT])
def test_dynamic_gives_transformers_logits_at_the_longest_request(tmp_path: Path, max_model_len: int) -> None:
    model = save_random(config_of(DYNAMIC), tmp_path)
    served = HPUDuoModel.from_pretrained(
        tmp_path, max_model_len=max_model_len, max_num_seqs=2, max_num_batched_tokens=13, block_size=BLOCK
    )
    prompt = prompts_of([max_model_len - 6])[0]
    ((new, got),) = greedy_logits(served.engine, [prompt], 6)
    torch.testing.assert_close(got, teacher_forced(model, prompt, new), atol=1e-4, rtol=0)
