"""Models whose decodes choose pages compute what transformers computes under the masks of that choice."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.quest_decodes import counting_reads
from graphs import BucketTable
from hpu_duo import HPUDuoModel
from hpu_duo.config.engine import CacheConfig, EngineConfig, GraphConfig, HeadConfig, ModelConfig
from hpu_duo.heads import HeadPattern
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.kv_budget import resolve_attention_rules
from kernels_ref import QuestBlocks, Rings, of_stores
from kernels_ref.pages import PageStep, clear_choices, store_choices, stored_choices
from tests.engine.tiny import serve, tokens_of
from tests.modeling.dense_oracle import Mask, masked_logits
from tests.modeling.driving import greedy_logits
from tests.modeling.families import BLOCK, Zoo, prompts_of
from tests.modeling.test_top_blocks import load as load_with_choice

LENGTHS = (1, BLOCK - 1, BLOCK + 1, 5 * BLOCK, 9 * BLOCK + 3, 12 * BLOCK + 1)
NUM_NEW = BLOCK + 3
TABLE = BucketTable.from_strings(["csu/q64/s40/u80/l6"])
PAGES, EVERY = 4, BLOCK // 2


def load(
    zoo: Zoo, name: str = "llama", pages: int = PAGES, every: int = EVERY, **options: Any
) -> HPUDuoModel:
    defaults = {"attention_rule": f"quest:pages={pages},every={every}", "max_model_len": 13 * BLOCK + NUM_NEW}
    return load_with_choice(zoo, name, **{**defaults, **options})


def seen_by_decodes(
    pages: int, every: int, num_prompt: int, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """Tokens that each head of a layer sees, by the largest product of a query with any corner of a page."""
    length, group = key.shape[1], len(query) // len(key)
    seen = torch.ones(len(key), length, length).tril().bool()
    for head, keys in enumerate(key.double()):
        mine = query[head * group : (head + 1) * group].double()
        for token in range(num_prompt, length):
            chooser, own = max(token - token % every, num_prompt), token // BLOCK
            scores = {}
            for page in range(own):
                low, high = keys[page * BLOCK : (page + 1) * BLOCK].aminmax(dim=0)
                corners = torch.stack([mine[:, chooser] * low, mine[:, chooser] * high])
                scores[page] = float(corners.amax(dim=0).sum(dim=-1).max())
            always = {0, own - 1, own}
            others = sorted(scores.keys() - always, key=lambda page: -scores[page])
            for page in others[max(0, pages - len(always)) :] if own >= pages else ():
                seen[head, token, page * BLOCK : (page + 1) * BLOCK] = False
    return seen


def expected_logits(
    zoo: Zoo, name: str, prompt: list[int], new: list[int], pages: int = PAGES, every: int = EVERY
) -> torch.Tensor:
    model, _ = zoo.load(name)
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    masks: list[Mask] = []
    for kind in types:
        if kind == "sliding_attention":
            ones = torch.ones(config.num_key_value_heads, *[len(prompt) + len(new)] * 2).tril().bool()
            masks.append(ones & ~ones.tril(-config.sliding_window))
        else:
            masks.append(partial(seen_by_decodes, pages, every, len(prompt)))
    return masked_logits(model, masks, [*prompt, *new])[-len(new) - 1 : -1]


def assert_served(
    zoo: Zoo,
    name: str = "llama",
    pages: int = PAGES,
    every: int = EVERY,
    prompts: list[list[int]] | None = None,
    **options: Any,
) -> HPUDuoModel:
    served = load(zoo, name, pages, every, **options)
    assert_logits(zoo, served, prompts or prompts_of(LENGTHS), name, pages, every)
    return served


def assert_logits(
    zoo: Zoo,
    served: HPUDuoModel,
    prompts: list[list[int]],
    name: str = "llama",
    pages: int = PAGES,
    every: int = EVERY,
) -> None:
    for prompt, (new, logits) in zip(prompts, greedy_logits(served.engine, prompts, NUM_NEW)):
        expected = expected_logits(zoo, name, prompt, new, pages, every)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "attention", "every"),
    [
        ("llama", "reference", 1),
        ("llama", "sdpa", EVERY),
        ("llama_mha", "sdpa", 1),
        ("qwen3", "sdpa", BLOCK),
        ("gpt_oss", "reference", EVERY),
        ("gemma2", "reference", EVERY),
    ],
)
def test_logits_equal_those_under_the_masks_of_the_choice(
    zoo: Zoo, name: str, attention: str, every: int
) -> None:
    assert_served(zoo, name, every=every, attention=attention)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_pages_for_the_whole_text_are_full_attention(zoo: Zoo, attention: str) -> None:
    prompts = prompts_of(LENGTHS)
    for_all = greedy_logits(load(zoo, pages=13 + 2, attention=attention).engine, prompts, NUM_NEW)
    of_plain = greedy_logits(load(zoo, attention=attention, attention_rule=None).engine, prompts, NUM_NEW)
    for (new, logits), (expected_new, expected) in zip(for_all, of_plain):
        assert new == expected_new
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_captured_steps_choose_too(zoo: Zoo, attention: str) -> None:
    assert_served(zoo, graphs="replay", buckets=TABLE, attention=attention)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_requests_get_the_tokens_that_they_get_alone_whatever_the_batch(zoo: Zoo, attention: str) -> None:
    """Bounds and choices go with cached prefixes and with requests that are preempted."""
    begin = prompts_of([7 * BLOCK + 2])[0]
    prompts = [[*begin, *more] for more in prompts_of([3, 2 * BLOCK, 9, 12, 5], seed=4)]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    together = load(zoo, num_blocks=15, max_num_seqs=3, attention=attention)
    alone = load(zoo, enable_prefix_caching=False, attention=attention)
    expected = [tokens_of(serve(alone, [prompt], params))[0] for prompt in prompts]
    for _ in range(2):
        assert tokens_of(serve(together, prompts, params)) == expected
    stats = together.stats()
    assert stats.prefixes is not None
    assert stats.prefixes.num_hit_tokens > 0
    assert stats.num_preemptions > 0


@pytest.mark.parametrize("more", [{}, {"max_num_batched_tokens": BLOCK + 6}])
def test_the_last_token_of_a_prompt_sees_all_tokens_behind_a_cached_prefix(
    zoo: Zoo, more: dict[str, Any]
) -> None:
    """Both its prefix and the chunks before it end one token before it."""
    served, prompt = load(zoo, attention="sdpa", max_chunk_rows=1, **more), prompts_of([8 * BLOCK + 1])[0]
    for _ in range(2):
        assert_logits(zoo, served, [prompt[:-1], prompt])
    stats = served.stats().prefixes
    assert stats is not None
    assert stats.num_hit_tokens == (7 + 7 + 7) * BLOCK


def test_samples_of_one_prompt_are_copies(zoo: Zoo) -> None:
    prompts = prompts_of([9 * BLOCK + 3])
    many, one = (
        serve(load(zoo, attention="sdpa"), prompts, SamplingParams(n=n, temperature=0, max_tokens=NUM_NEW))
        for n in (3, 1)
    )
    assert tokens_of(many) == [samples * 3 for samples in tokens_of(one)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_keeps_the_numbers_that_its_token_has_chosen(dtype: torch.dtype) -> None:
    units = of_stores(*torch.zeros(2, 4, 2, BLOCK + 2, 8, dtype=dtype))
    empty, own, turn = torch.empty(0, dtype=torch.int32), torch.tensor([1, 3]), torch.tensor([2, 1])
    plan = PageStep(empty, own[:1], own, own, own, turn, turn > 2, empty, empty)
    number = torch.tensor([[[32_767, 0, -1], [5, 4, 3]], [[1, 2, 300], [7, 6, -1]]], dtype=torch.int32)
    store_choices(units, plan, BLOCK, number)
    stored, is_due = stored_choices(units, plan, BLOCK, 3)
    assert torch.equal(stored, number)
    assert not is_due.any()
    assert not any(view[:, :, : BLOCK + 1].any() for view in units.views)
    assert stored_choices(units, plan._replace(turn=turn + 1), BLOCK, 3)[1].all()
    clear_choices(units, plan, BLOCK)
    assert stored_choices(units, plan, BLOCK, 3)[1].tolist() == [True, False]


def test_two_bytes_number_the_pages_of_a_text_and_not_those_of_the_cache() -> None:
    config = EngineConfig(
        model=ModelConfig(path="unread"),
        cache=CacheConfig(block_size=BLOCK),
        heads=HeadConfig(attention_rule=f"quest:pages={PAGES},every={EVERY}"),
        graph=GraphConfig(backend="eager"),
    )
    [kind] = resolve_attention_rules(config, torch.device("cpu"), BLOCK << 15) or ()
    assert kind.layout(40_000, 2, BLOCK).num_units == 40_000
    with pytest.raises(ValueError, match=r"expected max_model_len up to 262144 .* got 262145"):
        resolve_attention_rules(config, torch.device("cpu"), (BLOCK << 15) + 1)


def test_retrieval_heads_of_a_pattern_choose_and_the_others_keep_their_rings(zoo: Zoo) -> None:
    model, _ = zoo.load("llama_mha")
    config = model.config
    mask = np.zeros((config.num_hidden_layers, config.num_key_value_heads), bool)
    mask[:, 1::2] = True
    pattern = HeadPattern(mask.astype(np.float32), 2, 6, retrieval=mask)
    every, none = (
        load(zoo, "llama_mha", attention="sdpa", pattern=pattern, **rule)
        for rule in ({"pages": 16}, {"attention_rule": None})
    )
    (groups,) = {spec.groups for spec in every.engine.runner.model.specs}
    assert [type(group.kind) for group in groups] == [QuestBlocks, Rings]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    prompts = prompts_of(LENGTHS)
    assert tokens_of(serve(every, prompts, params)) == tokens_of(serve(none, prompts, params))


@pytest.mark.parametrize(("every", "num_slots"), [(1, 1), (EVERY, 2)])
def test_a_text_takes_the_bytes_of_its_keys_and_of_the_further_slots(
    zoo: Zoo, every: int, num_slots: int
) -> None:
    """So the ratio to full attention is more only where that would store narrower floats."""
    plan = load(zoo, every=every, dtype="float32").engine.runner.store.plan
    kept, full = plan.bytes_per_request(5 * BLOCK), plan.full_attention_bytes(5 * BLOCK)
    assert kept * BLOCK == full * (BLOCK + num_slots)


def test_stats_count_the_pages_that_decodes_read(zoo: Zoo) -> None:
    served = load(zoo, attention="sdpa")
    serve(served, prompts_of([9 * BLOCK]), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    (stats,) = served.stats().attention_rules
    # Prompts see all: 1 + ... + 9 blocks. Two tokens are decoded with 10 blocks in the cache.
    assert (stats.tiles.num_tiles, stats.tiles.num_dense_tiles) == (45 + 2 * PAGES, 45 + 2 * 10)


@pytest.mark.parametrize("every", [1, EVERY])
def test_decodes_read_the_bytes_that_the_formula_and_the_stats_have(zoo: Zoo, every: int) -> None:
    """Counted by the pages and bounds that kernels get."""
    served, num_prompt = load(zoo, every=every, attention="sdpa"), 9 * BLOCK
    config = zoo.load("llama")[0].config
    of_a_token = served.engine.runner.store.plan.layers[0].head_dim * 4 * 2
    with counting_reads() as reads:
        serve(
            served,
            prompts_of([num_prompt]),
            SamplingParams(temperature=0, max_tokens=NUM_NEW + 1, ignore_eos=True),
        )
    seen = range(num_prompt + 1, num_prompt + NUM_NEW + 1)
    num_tokens = sum((PAGES - 1) * BLOCK + (each - 1) % BLOCK + 1 for each in seen)
    num_bounds = sum((each - 1) // BLOCK for each in seen if (each - 1) % every == 0)
    num_heads = config.num_hidden_layers * config.num_key_value_heads
    assert reads.key_bytes == num_heads * num_tokens * of_a_token
    assert reads.bound_bytes == num_heads * num_bounds * of_a_token
    (stats,) = served.stats().attention_rules
    assert reads.num_pages == num_heads * (stats.tiles.num_tiles - 45)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pages": 2}, "expected pages >= 3"),
        ({"every": 0}, "expected every >= 1"),
        ({"every": 3}, "expected block_size to be a multiple of every"),
        ({"pages": 1000}, "expected pages of at most"),
        ({"attention_rule": "quest|band"}, "expected quest, top_blocks alone"),
        ({"speculative_config": {"num_speculative_tokens": 3}, "max_num_batched_tokens": 48}, "decode_len=1"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='auto' only"),
        ({"attention": "sdpa", "graphs": "compile", "buckets": TABLE}, "graphs 'eager' or 'replay'"),
        ({"attention": "triton"}, "'sdpa', or without a compiler 'reference', on a CPU only"),
        ({"kv_policy": "local", "kv_budget": 8}, "kv_policy=None only"),
        ({"cpu_attention": 0.1, "enable_prefix_caching": False}, "cpu_attention=None only"),
    ],
)
def test_what_does_not_go_with_pages_is_refused(zoo: Zoo, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(zoo, **options)
