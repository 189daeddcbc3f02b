"""Policies that turn queries: Expected Attention, and positions among the kept tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphs.backends.compile import CompileBackend
from hpu_duo.modeling.probe import read_layers, rotary_frequencies
from tests.modeling.budget_driving import assert_follows, run_budget
from tests.modeling.budget_oracle import BudgetOracle, budget_logits
from tests.modeling.families import FAMILIES, Zoo, prompts_of
from tests.modeling.test_kv_budget import BUDGET, CHUNK, NUM_NEW, TABLE, WHOLE, assert_served, load
from tests.tiers import crossed, further

PLACED, EXPECTED = "streaming-llm:positions=cache", "expected-attention:sink=2,future=20"


@pytest.mark.parametrize(
    ("name", "policy"),
    crossed(
        ["llama_mha", "llama_mqa", "qwen2", "qwen3", "mistral", "olmo2"],
        [PLACED, EXPECTED],
        fast=("llama_mha", "llama_mqa", "qwen3"),
    ),
)
def test_families_with_a_plain_rotary_embedding_follow_the_definition(
    zoo: Zoo, name: str, policy: str
) -> None:
    assert_served(zoo, name, policy)


@pytest.mark.parametrize("policy", [PLACED, EXPECTED])
def test_heads_of_which_a_part_is_turned_follow_the_definition(zoo: Zoo, policy: str) -> None:
    seen = run_budget(load(zoo, "gpt_neox", policy), prompts_of(), NUM_NEW)
    numbers = {"budget": BUDGET, "chunk": CHUNK, "rotary_share": 0.5}
    assert_follows(zoo.load("gpt_neox")[0], seen, prompts_of(), policy=policy, **numbers)


@pytest.mark.parametrize(
    ("policy", "options"),
    crossed([PLACED, EXPECTED], [{"attention": "sdpa"}, {"graphs": "replay", "buckets": TABLE}]),
)
def test_fused_kernels_and_recorded_steps_keep_the_same(
    zoo: Zoo, policy: str, options: dict[str, Any]
) -> None:
    assert_served(zoo, "llama", policy, **options)


# Compiled streams have a fast test in test_kv_budget_positions.py.
@pytest.mark.parametrize("policy", further(PLACED, EXPECTED))
def test_compiled_layers_keep_the_same(zoo: Zoo, policy: str) -> None:
    assert_served(zoo, "llama", policy, graphs=CompileBackend("eager"), buckets=TABLE)


@pytest.mark.parametrize(
    ("attention", "policy"),
    crossed(
        ["reference", "sdpa"], [PLACED, "streaming-llm:sink=5,positions=cache", EXPECTED], fast=("sdpa",)
    ),
)
def test_chunks_shorter_than_the_sinks_follow_the_definition(zoo: Zoo, policy: str, attention: str) -> None:
    assert_served(zoo, "llama", policy, attention=attention, kv_chunk=2)


def test_expected_attention_of_a_whole_prompt_counts_all_its_queries(zoo: Zoo) -> None:
    seen = run_budget(load(zoo, "llama", EXPECTED, **WHOLE), prompts_of(), NUM_NEW)
    assert_follows(zoo.load("llama")[0], seen, prompts_of(), policy=EXPECTED, budget=BUDGET, chunk=1 << 20)


def test_places_among_kept_tokens_differ_from_positions_of_the_text(zoo: Zoo) -> None:
    model, text = zoo.load("llama")[0], prompts_of([40])[0]
    numbers: dict[str, Any] = {"budget": BUDGET, "chunk": CHUNK, "prompt_len": len(text)}
    placed, plain = (
        budget_logits(model, BudgetOracle(policy, **numbers), text) for policy in (PLACED, "streaming-llm")
    )
    torch.testing.assert_close(placed[:BUDGET], plain[:BUDGET])
    assert (placed[-1] - plain[-1]).abs().max() > 1e-2


def test_texts_beyond_the_trained_length_are_served_by_place(zoo: Zoo) -> None:
    model, _ = zoo.load("llama")
    longest = model.config.max_position_embeddings + 60
    prompts = prompts_of([longest - 30, 7])
    options: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    options |= {"kv_chunk": 30, "kv_budget": 20}
    seen = run_budget(load(zoo, "llama", PLACED, **options), prompts, 8)
    assert_follows(model, seen, prompts, policy=PLACED, budget=20, chunk=30)
    for policy in ("streaming-llm", EXPECTED):
        with pytest.raises(ValueError, match="max_model_len of at most"):
            load(zoo, "llama", policy, **options)
    for whole in ({"kv_chunk": 30}, {"kv_chunk": None, "max_num_batched_tokens": longest + 1}):
        with pytest.raises(ValueError, match="max_model_len of at most"):
            load(zoo, "llama", PLACED, **{**options, **WHOLE, **whole, "max_model_len": longest})
    most = longest - 60
    with pytest.raises(ValueError, match=f"of at most {most} tokens together"):
        load(zoo, "llama", PLACED, **{**options, "kv_budget": most})


@pytest.mark.parametrize("policy", [PLACED, EXPECTED])
@pytest.mark.parametrize("name", sorted({"gpt2", "cohere", "smollm3"} & set(FAMILIES)))
def test_models_without_a_plain_rotary_embedding_are_refused_by_name(
    zoo: Zoo, name: str, policy: str
) -> None:
    with pytest.raises(ValueError, match=r"(ForCausalLM|LMHeadModel), layer \d is not served with kv_policy"):
        load(zoo, name, policy)


def test_layers_without_rotary_embedding_have_no_frequencies(zoo: Zoo) -> None:
    served = load(zoo, "smollm3", "h2o")
    model = served.engine.runner.model.model
    found = rotary_frequencies(model, read_layers(model))
    assert [each is None for each in found] == [False, True, False, True]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("streaming-llm:positions=both", "positions=text or positions=cache"),
        ("expected-attention:sink=9", "a budget above 9 slots, got 9"),
        ("expected-attention:future=0", "future >= 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(zoo: Zoo, policy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(zoo, "llama", policy)
