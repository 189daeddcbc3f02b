"""Models whose prompts choose blocks compute what transformers computes under the masks of that choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from bias_builders import TopBlocks
from graphs import BucketTable
from graphs.backends.compile import CompileBackend
from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from kernels_ref import Blocks, ChosenBlocks
from tests.engine.tiny import serve, tokens_of
from tests.modeling.dense_oracle import Mask, masked_logits
from tests.modeling.driving import greedy_logits
from tests.modeling.families import BLOCK, Zoo, prompts_of
from tests.tiers import crossed, further

LENGTHS = (1, BLOCK - 1, BLOCK + 1, 5 * BLOCK, 9 * BLOCK + 3, 12 * BLOCK + 1)
NUM_NEW = 5
MAX_LEN = 13 * BLOCK + NUM_NEW
RULE = "top_blocks:blocks=4"
TABLE = BucketTable.from_strings(["csu/q64/s40/u80/l6"])


def load(zoo: Zoo, name: str, **options: Any) -> HPUDuoModel:
    defaults = {
        "max_num_seqs": len(LENGTHS),
        "max_num_batched_tokens": 3 * BLOCK + len(LENGTHS),
        "max_model_len": MAX_LEN,
        "attention_rule": RULE,
        "attention": "reference",
    }
    return HPUDuoModel.from_pretrained(zoo.load(name)[1], block_size=BLOCK, **{**defaults, **options})


def chosen_mask(
    choices: Sequence[int | None],
    num_prompt: int,
    softcap: float | None,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor:
    """Tokens that each head of a layer sees, one tile and one head at a time; no choice = all."""
    length, group = key.shape[1], len(query) // len(key)
    seen = torch.ones(len(key), length, length).tril().bool()
    for head, most in enumerate(choices * len(key) if len(choices) == 1 else choices):
        for tile in range(num_prompt // BLOCK if most else 0):
            mine = query[head * group : (head + 1) * group, tile * BLOCK : (tile + 1) * BLOCK].double()
            received = [0.0] * tile
            for of_head in mine:
                mean = of_head.mean(dim=0)
                scores = [
                    float(mean @ key[head, block * BLOCK : (block + 1) * BLOCK].double().mean(dim=0))
                    for block in range(tile)
                ]
                if softcap is not None:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                total = sum(math.exp(score) for score in scores)
                received = [sum_ + math.exp(score) / total for sum_, score in zip(received, scores)]
            always = {0, tile - 1, tile}
            others = sorted({*range(tile)} - always, key=lambda block: -received[block])
            kept = always | {*others[: most - 3]}
            for block in {*range(tile)} - kept:
                rows = slice(tile * BLOCK, (tile + 1) * BLOCK)
                seen[head, rows, block * BLOCK : (block + 1) * BLOCK] = False
    return seen


def expected_logits(
    zoo: Zoo, name: str, prompt: list[int], new: list[int], choices: Sequence[int | None] = (4,)
) -> torch.Tensor:
    model, _ = zoo.load(name)
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    softcap = getattr(config, "attn_logit_softcapping", None)
    masks: list[Mask] = []
    for kind in types:
        if kind == "sliding_attention":
            ones = torch.ones(config.num_key_value_heads, *[len(prompt) + len(new)] * 2).tril().bool()
            masks.append(ones & ~ones.tril(-config.sliding_window))
        else:
            masks.append(partial(chosen_mask, choices, len(prompt), softcap))
    return masked_logits(model, masks, [*prompt, *new])[-len(new) - 1 : -1]


def assert_served(
    zoo: Zoo,
    name: str,
    prompts: list[list[int]] | None = None,
    choices: Sequence[int | None] = (4,),
    **options: Any,
) -> HPUDuoModel:
    served = load(zoo, name, **options)
    assert_logits(zoo, name, served, prompts or prompts_of(LENGTHS), choices)
    return served


def assert_logits(
    zoo: Zoo, name: str, served: HPUDuoModel, prompts: list[list[int]], choices: Sequence[int | None] = (4,)
) -> None:
    for prompt, (new, logits) in zip(prompts, greedy_logits(served.engine, prompts, NUM_NEW)):
        expected = expected_logits(zoo, name, prompt, new, choices)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "attention"),
    crossed(
        ["llama", "llama_mha", "llama_mqa", "qwen3", "gpt_neox"],
        ["reference", "sdpa"],
        fast=("llama", "llama_mha", "llama_mqa"),
    ),
)
def test_logits_equal_those_under_the_masks_of_the_choice(zoo: Zoo, name: str, attention: str) -> None:
    assert_served(zoo, name, attention=attention)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss"])
def test_layers_with_a_window_keep_it_beside_soft_caps_and_sink_logits(zoo: Zoo, name: str) -> None:
    assert_served(zoo, name)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_blocks_for_the_whole_text_are_full_attention(zoo: Zoo, attention: str) -> None:
    every = f"top_blocks:blocks={-(-MAX_LEN // BLOCK)}"
    assert_served(zoo, "llama", choices=(None,), attention=attention, attention_rule=every)


def test_one_step_over_all_blocks_is_full_attention_to_the_last_bit(zoo: Zoo) -> None:
    every = f"top_blocks:blocks={-(-MAX_LEN // BLOCK)}"
    prompts = prompts_of(LENGTHS[-1:])
    for_all, of_plain = (
        greedy_logits(
            load(zoo, "llama", attention_rule=rule, max_num_batched_tokens=MAX_LEN).engine, prompts, 3
        )
        for rule in (every, None)
    )
    assert for_all[0][0] == of_plain[0][0]
    assert torch.equal(for_all[0][1], of_plain[0][1])


@pytest.mark.parametrize(
    ("tokens", "attention"), crossed([BLOCK + 5, 5 * BLOCK + 7, MAX_LEN + 5], ["reference", "sdpa"])
)
def test_chunks_do_not_change_what_is_seen(zoo: Zoo, tokens: int, attention: str) -> None:
    assert_served(zoo, "llama", max_num_batched_tokens=tokens, attention=attention)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_several_prompts_continue_in_one_step(zoo: Zoo, attention: str) -> None:
    tokens = 3 * 2 * BLOCK + len(LENGTHS)
    prompts = prompts_of([9 * BLOCK + 3, 12 * BLOCK, 7 * BLOCK + 1, 11 * BLOCK + 4])
    assert_served(zoo, "llama", prompts, max_num_batched_tokens=tokens, max_chunk_rows=3, attention=attention)


@pytest.mark.parametrize(
    ("attention", "graphs"),
    [("reference", "replay"), ("sdpa", "replay"), ("sdpa", CompileBackend("eager"))],
)
def test_captured_steps_choose_too(zoo: Zoo, attention: str, graphs: str | CompileBackend) -> None:
    assert_served(zoo, "llama", graphs=graphs, buckets=TABLE, attention=attention)


@pytest.mark.slow
def test_compiled_steps_choose_too(zoo: Zoo) -> None:
    assert_served(zoo, "llama", graphs="compile", buckets=TABLE, attention="sdpa")


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_each_head_may_choose_or_have_a_rule_or_see_all(zoo: Zoo, attention: str) -> None:
    rule = "top_blocks:blocks=3;full;top_blocks:blocks=5;top_blocks:blocks=3"
    served = assert_served(
        zoo, "llama_mha", choices=(3, None, 5, 3), attention=attention, attention_rule=rule
    )
    (groups,) = {spec.groups for spec in served.engine.runner.model.specs}
    chunk = served.engine.scheduler.limits.chunk_grid
    kinds = [Blocks(), ChosenBlocks(TopBlocks(3), chunk), ChosenBlocks(TopBlocks(5), chunk)]
    assert [(group.kind, group.num_heads) for group in groups] == list(zip(kinds, [1, 2, 1]))


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_prompts_take_up_whole_blocks_of_a_cached_prefix(zoo: Zoo, attention: str) -> None:
    served, prefix = load(zoo, "llama", attention=attention), prompts_of([5 * BLOCK + 3])[0]
    greedy_logits(served.engine, [prefix], NUM_NEW)
    prompts = [[*prefix[: 5 * BLOCK], *more] for more in prompts_of([3, 5 * BLOCK, 2 * BLOCK + 1], seed=1)]
    for _ in range(2):
        assert_logits(zoo, "llama", served, prompts)
    stats = served.stats().prefixes
    assert stats is not None
    # No multiple of a chunk, which is 3 blocks.
    assert stats.num_hit_tokens >= 2 * 3 * 5 * BLOCK


def test_a_document_is_read_once_by_whole_blocks_and_asked_often(zoo: Zoo, tmp_path: Path) -> None:
    document, questions = prompts_of([5 * BLOCK + 3])[0], prompts_of([3, 4 * BLOCK], seed=6)
    alone = load(zoo, "llama", enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    expected = tokens_of(serve(alone, [[*document, *question] for question in questions], params))
    served = load(zoo, "llama")
    with served.prefill(document) as context:
        assert context.num_held_tokens == 5 * BLOCK
        prompts = [context.prompt(question) for question in questions]
        assert tokens_of(served.engine.generate(prompts, params, context=context.hold())) == expected
        with pytest.raises(ValueError, match="without kv_policy and top_blocks"):
            context.save(tmp_path / "document.context")


def test_what_a_request_decodes_is_no_prefix_of_a_prompt(zoo: Zoo) -> None:
    served, first = load(zoo, "llama"), prompts_of([7 * BLOCK - 2])[0]
    ((new, _),) = greedy_logits(served.engine, [first], NUM_NEW)
    assert_logits(zoo, "llama", served, [[*first, *new, *prompts_of([2 * BLOCK], seed=2)[0]]])


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_a_preempted_request_goes_on_as_it_began(zoo: Zoo, attention: str) -> None:
    options = {"num_blocks": 20, "max_num_seqs": 3, "enable_prefix_caching": False, "attention": attention}
    served, prompts = load(zoo, "llama", **options), prompts_of([6 * BLOCK - 2, 6 * BLOCK + 5, 7 * BLOCK])
    for prompt, (new, logits) in zip(prompts, greedy_logits(served.engine, prompts, 2 * BLOCK)):
        torch.testing.assert_close(logits, expected_logits(zoo, "llama", prompt, new), atol=1e-4, rtol=0)


def test_drafts_of_decodes_are_verified_without_a_change_of_tokens(zoo: Zoo) -> None:
    """Chunks choose, and decodes see all blocks."""
    params = SamplingParams(temperature=0, max_tokens=2 * BLOCK, ignore_eos=True)
    prompts = prompts_of([6 * BLOCK, 7 * BLOCK + 2, 1], seed=3)
    expected = load(zoo, "llama").engine.generate(prompts, params)
    predicting = [replace(params, prediction_token_ids=done.token_ids) for (done,) in expected]
    drafting = load(zoo, "llama", speculative_config={"num_speculative_tokens": 3}, max_num_batched_tokens=48)
    assert tokens_of(drafting.engine.generate(prompts, predicting)) == tokens_of(expected)
    assert drafting.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("attention", [*further("reference"), "sdpa"])
def test_requests_get_the_tokens_that_they_get_alone_whatever_the_batch(zoo: Zoo, attention: str) -> None:
    random = Random(5)
    begins = prompts_of([3 * BLOCK, 7 * BLOCK + 2], seed=3)
    lengths = [random.randint(1, 4 * BLOCK) for _ in range(10)]
    prompts = [[*random.choice([*begins, []]), *more] for more in prompts_of(lengths, seed=4)]
    params = SamplingParams(temperature=0, max_tokens=2 * BLOCK, ignore_eos=True)
    together = load(
        zoo, "llama", attention=attention, num_blocks=18, max_chunk_rows=2, max_num_batched_tokens=60
    )
    alone = load(
        zoo, "llama", attention=attention, enable_prefix_caching=False, max_num_batched_tokens=MAX_LEN
    )
    expected = [tokens_of(serve(alone, [prompt], params))[0] for prompt in prompts]
    assert tokens_of(serve(together, prompts, params)) == expected
    stats = together.stats()
    assert stats.prefixes is not None
    assert stats.prefixes.num_hit_tokens > 0
    assert stats.num_preemptions > 0


def test_greedy_samples_of_one_prompt_are_copies(zoo: Zoo) -> None:
    prompts = prompts_of([9 * BLOCK, 9 * BLOCK + 3])
    many, one = (
        serve(load(zoo, "llama"), prompts, SamplingParams(n=n, temperature=0, max_tokens=12)) for n in (3, 1)
    )
    assert tokens_of(many) == [samples * 3 for samples in tokens_of(one)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_rule": "top_blocks:blocks=2"}, "expected blocks >= 3"),
        ({"attention_rule": "top_blocks:keep=2"}, "expected options of attention_rule 'top_blocks'"),
        ({"attention_rule": "top_blocks|band"}, "expected quest, top_blocks alone"),
        ({"attention_rule": "band&top_blocks:blocks=4"}, "expected quest, top_blocks alone"),
        ({"attention_rule": "top"}, "strided, quest, top_blocks, got 'top'"),
        ({"max_num_batched_tokens": BLOCK + 2}, f"expected block_size of 2 to 5.*got {BLOCK}"),
        ({"attention": "triton"}, "'sdpa', or without a compiler 'reference', on a CPU only"),
        ({"graphs": "compile", "buckets": TABLE}, "'sdpa', or without a compiler 'reference', on a CPU only"),
        ({"kv_policy": "local", "kv_budget": 8}, "kv_policy=None only"),
    ],
)
def test_what_is_no_choice_or_does_not_go_with_one_is_refused(
    zoo: Zoo, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(zoo, "llama", **options)
