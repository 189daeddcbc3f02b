"""Whole prompts in chunks: heads with a budget see the whole prompt and choose once, at its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphs import BucketTable
from graphs.backends.compile import CompileBackend
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.modeling.attention import AttentionLayer
from kernels_ref.chunks import ChunkBounds
from tests.modeling.budget_driving import BUDGET, CHUNK, NUM_NEW, assert_follows, load_budget, run_budget
from tests.modeling.families import BLOCK, LENGTHS, Zoo, prompts_of
from tests.tiers import crossed, further

ONE_CHUNK = 1 << 20
MASK = np.array([[1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0]], np.bool_)
PATTERN = HeadPattern(MASK.astype(np.float32), 2, 3, retrieval=MASK)


def load(zoo: Zoo, name: str, policy: str, **options: Any) -> HPUDuoModel:
    return load_budget(zoo.load(name)[1], policy, **{"kv_prompt": "whole", **options})


def assert_served(zoo: Zoo, name: str, policy: str, **options: Any) -> None:
    seen = run_budget(load(zoo, name, policy, **options), prompts_of(), NUM_NEW)
    numbers = {"budget": options.get("kv_budget", BUDGET), "chunk": ONE_CHUNK}
    assert_follows(zoo.load(name)[0], seen, prompts_of(), policy=policy, **numbers)


POLICIES = (
    *("h2o", "h2o:recent=0", "tova", "tova:protect=3", "snapkv:window=3,kernel=3", "streaming-llm"),
    *("streaming-llm:positions=cache", "h2o:positions=cache", "local"),
)


@pytest.mark.parametrize(
    ("policy", "attention"),
    crossed(
        POLICIES, ["reference", "sdpa"], fast={*POLICIES} - {"local", "h2o", "streaming-llm:positions=cache"}
    ),
)
def test_chunks_of_a_prompt_leave_what_all_of_it_in_one_step_would(
    zoo: Zoo, policy: str, attention: str
) -> None:
    assert_served(zoo, "llama", policy, attention=attention)


@pytest.mark.parametrize(
    ("policy", "attention"), crossed(["h2o", "snapkv:window=3,kernel=3"], ["reference", "sdpa"])
)
def test_long_texts_are_read_a_segment_at_a_time(zoo: Zoo, policy: str, attention: str) -> None:
    served = load(zoo, "llama", policy, attention=attention)
    for module in served.engine.runner.model.model.modules():
        if isinstance(module, AttentionLayer):
            module.spec = replace(module.spec, chunks=ChunkBounds(key_slots=8))
    seen = run_budget(served, prompts_of(), NUM_NEW)
    assert_follows(zoo.load("llama")[0], seen, prompts_of(), policy=policy, budget=BUDGET, chunk=ONE_CHUNK)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *further(("llama_mha", "h2o")),
        ("llama_mqa", "tova"),
        *further(("qwen3", "snapkv:window=3,kernel=3"), ("gpt_neox", "h2o"), ("gemma2", "h2o")),
        ("gpt_oss", "h2o"),
    ],
)
def test_families_follow_the_definition(zoo: Zoo, name: str, policy: str) -> None:
    assert_served(zoo, name, policy)


@pytest.mark.parametrize(
    ("chunk", "options"),
    [
        *further((3, {"max_num_batched_tokens": 12, "max_chunk_rows": 1})),
        (5, {"max_num_batched_tokens": 21, "max_chunk_rows": 3}),
        *further((20, {"max_num_batched_tokens": 64, "max_chunk_rows": 2, "max_num_seqs": 3})),
        (80, {"max_num_batched_tokens": 85, "max_chunk_rows": 1}),
    ],
)
def test_neither_chunks_nor_rows_change_what_is_kept(zoo: Zoo, chunk: int, options: dict[str, Any]) -> None:
    assert_served(zoo, "llama", "h2o", kv_chunk=chunk, **options)


def test_a_step_that_does_not_hold_the_longest_text_reads_prompts_in_chunks(zoo: Zoo) -> None:
    options = {"kv_chunk": None, "max_num_batched_tokens": 40, "max_chunk_rows": 1}
    served = load(zoo, "llama", "h2o", **options)
    assert served.engine.scheduler.limits.num_regions == 1
    assert_served(zoo, "llama", "h2o", **options)


def test_a_pattern_and_preemptions_change_nothing(zoo: Zoo) -> None:
    options = {"pattern": PATTERN, "num_blocks": 9, "max_model_len": 60}
    prompts, preempted = prompts_of([19, 13, 22]), []
    served = load(zoo, "llama_mha", "h2o", **options)
    seen = run_budget(served, prompts, 16, preempted)
    heads = [np.flatnonzero(~retrieves).tolist() for retrieves in MASK]
    numbers = {"budget": BUDGET, "chunk": ONE_CHUNK, "heads": heads}
    assert_follows(zoo.load("llama_mha")[0], seen, prompts, policy="h2o", **numbers)
    assert preempted
    regions = served.engine.scheduler.allocations.regions
    assert regions is not None
    assert regions.num_used == 0


@pytest.mark.parametrize(
    ("graphs", "policy"),
    # Budgets of compiled steps have a fast test in test_kv_budget.py.
    crossed(["replay", CompileBackend("eager")], ["streaming-llm", "h2o", "tova"], fast=("replay",)),
)
def test_captured_steps_follow_the_definition(zoo: Zoo, graphs: str | CompileBackend, policy: str) -> None:
    table = BucketTable.from_strings(["csu/q20/s6/u0/l6", f"csu/q20/s{-(-80 // BLOCK)}/u0/l6"])
    assert_served(zoo, "llama", policy, graphs=graphs, buckets=table)


def test_what_is_kept_does_not_depend_on_who_else_runs(zoo: Zoo) -> None:
    together = run_budget(load(zoo, "llama", "h2o"), prompts_of(), NUM_NEW)
    served = load(zoo, "llama", "h2o", max_num_seqs=1, max_num_batched_tokens=CHUNK, max_chunk_rows=1)
    for prompt, seen in zip(prompts_of(), together):
        (alone,) = run_budget(served, [prompt], NUM_NEW)
        assert (alone.kept, alone.new) == (seen.kept, seen.new)


def test_stores_take_what_the_memory_plan_says(zoo: Zoo) -> None:
    store = load(zoo, "llama_mha", "h2o", pattern=PATTERN, num_blocks=20).engine.runner.store
    dim, heads, num_rows = 8, int((~MASK).sum()), len(LENGTHS) + 1
    blocks = 2 * int(MASK.sum()) * 21 * BLOCK * dim * 4
    slots = heads * BUDGET * num_rows * (2 * dim * 4 + 8)
    # Two regions: keys and values of 80 tokens and of one that padding writes, and a score of each token.
    regions = 2 * heads * (81 * 2 * dim * 4 + 80 * 4)
    assert store.num_bytes == store.plan.total_bytes == blocks + slots + regions
    assert store.plan.scratch_bytes == regions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_chunk": 40}, "kv_chunk of 2 to 7 tokens"),
        ({"kv_chunk": 2}, "chunks of at least 3 tokens, got 2"),
        ({"kv_policy": "snapkv:window=6,kernel=3"}, "chunks of at least 7 tokens, got 6"),
        ({"kv_policy": "expected-attention:sink=2"}, "counts all queries of a whole prompt: .* at least 85"),
        ({"enable_prefix_caching": True}, "does not support the prefix cache"),
    ],
)
def test_what_is_not_served_is_refused(zoo: Zoo, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(zoo, "llama", **{"policy": options.pop("kv_policy", "h2o"), **options})
