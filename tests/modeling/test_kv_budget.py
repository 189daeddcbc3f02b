"""Heads with a KV budget keep what the definition of their policy keeps, and attend to nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from graphs import BucketTable
from graphs.backends.compile import CompileBackend
from hpu_duo import HeadPattern, HPUDuoModel
from hpu_duo.lab.kept_tokens import positions_of
from hpu_duo.sampling import SamplingParams
from tests.modeling.budget_driving import BUDGET, CHUNK, NUM_NEW, assert_follows, load_budget, run_budget
from tests.modeling.driving import teacher_forced
from tests.modeling.families import BLOCK, LENGTHS, Zoo, prompts_of
from tests.tiers import crossed, further

POLICIES = [
    "local",
    "streaming-llm",
    "streaming-llm:sink=2",
    "h2o",
    "h2o:recent=0",
    "tova",
    "tova:protect=3",
    "snapkv:window=3,kernel=3",
    "snapkv:window=8,kernel=1",
    "streaming-llm:positions=cache",
    "expected-attention:sink=2,future=20",
]
MASK = np.array([[1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0]], np.bool_)
PATTERN = HeadPattern(MASK.astype(np.float32), 2, 3, retrieval=MASK)
TABLE = BucketTable.from_strings(["csu/q20/s0/u0/l6"])


def load(zoo: Zoo, name: str, policy: str, **options: Any) -> HPUDuoModel:
    return load_budget(zoo.load(name)[1], policy, **options)


def assert_served(zoo: Zoo, name: str, policy: str, **options: Any) -> None:
    served = load(zoo, name, policy, **options)
    seen = run_budget(served, prompts_of(), NUM_NEW)
    numbers = {"budget": options.get("kv_budget", BUDGET), "chunk": options.get("kv_chunk", CHUNK)}
    assert_follows(zoo.load(name)[0], seen, prompts_of(), policy=policy, **numbers)


# Whole prompts of the others have fast tests in test_whole_prompts.py.
@pytest.mark.parametrize(
    "policy",
    crossed(POLICIES, fast={*POLICIES} - {"streaming-llm", "h2o:recent=0", "tova", "tova:protect=3"}),
)
def test_kept_sets_logits_and_tokens_are_those_of_the_definition(zoo: Zoo, policy: str) -> None:
    assert_served(zoo, "llama", policy)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("llama_mha", "h2o"),
        *further(("llama_mqa", "h2o")),
        ("llama_mqa", "tova"),
        *further(("qwen2", "tova"), ("qwen3", "h2o"), ("mistral", "streaming-llm")),
        ("gpt_neox", "tova"),
        *further(("olmo2", "h2o")),
    ],
)
def test_families_follow_the_definition(zoo: Zoo, name: str, policy: str) -> None:
    assert_served(zoo, name, policy)


@pytest.mark.parametrize(
    ("chunk", "policy"), crossed([6, 17], ["fixed:stride=16,columns=1", "strided:stride=14"])
)
def test_patterns_by_position_leave_what_the_newest_token_sees(zoo: Zoo, policy: str, chunk: int) -> None:
    options = {"kv_budget": 21, "kv_chunk": chunk, "max_num_batched_tokens": 2 * chunk + len(LENGTHS)}
    assert_served(zoo, "llama", policy, **options)


@pytest.mark.parametrize("name", ["gemma2", *further("gemma3"), "gpt_oss", *further("qwen2_partly_sliding")])
def test_layers_with_a_window_keep_it_beside_soft_caps_and_sink_logits(zoo: Zoo, name: str) -> None:
    assert_served(zoo, name, "h2o")


@pytest.mark.parametrize("policy", [*further("streaming-llm"), "h2o", *further("tova")])
def test_fused_kernels_keep_the_same(zoo: Zoo, policy: str) -> None:
    assert_served(zoo, "llama", policy, attention="sdpa")


@pytest.mark.parametrize(
    ("budget", "chunk", "options"),
    [
        (5, 16, {"max_num_batched_tokens": 40, "max_chunk_rows": 1}),
        (16, 5, {"max_num_batched_tokens": 21, "max_chunk_rows": 3}),
        (20, 20, {"max_num_batched_tokens": 64, "max_chunk_rows": 2, "max_num_seqs": 3}),
        (2, 2, {"max_num_batched_tokens": 9, "max_chunk_rows": 1}),
    ],
)
def test_slots_and_chunks_of_any_size_follow_the_definition(
    zoo: Zoo, budget: int, chunk: int, options: dict[str, Any]
) -> None:
    assert_served(zoo, "llama", "h2o", kv_budget=budget, kv_chunk=chunk, **options)


def test_a_chunk_longer_than_a_budget_of_a_whole_text_is_full_attention(zoo: Zoo) -> None:
    served = load(zoo, "llama", "h2o", kv_budget=1.0, kv_chunk=24, max_num_batched_tokens=64)
    model, _ = zoo.load("llama")
    for prompt, seen in zip(prompts_of(), run_budget(served, prompts_of(), NUM_NEW)):
        expected = teacher_forced(model, prompt, seen.new)
        torch.testing.assert_close(seen.logits, expected, atol=1e-4, rtol=0)
        everything = list(range(len(prompt) + NUM_NEW - 1))
        assert all(head == everything for layer in seen.kept for head in layer)


WHOLE: dict[str, Any] = {"kv_prompt": "whole", "kv_chunk": None, "max_num_batched_tokens": 80 + len(LENGTHS)}


@pytest.mark.parametrize(
    ("policy", "options"),
    crossed(
        ["h2o", "tova", "snapkv:window=3,kernel=3", "streaming-llm", "local"],
        [{}, {"max_chunk_rows": 1}, {"max_num_seqs": 2, "max_num_batched_tokens": 81}],
    ),
)
def test_whole_prompts_are_read_with_full_attention_and_cut_once(
    zoo: Zoo, policy: str, options: dict[str, Any]
) -> None:
    seen = run_budget(load(zoo, "llama", policy, **{**WHOLE, **options}), prompts_of(), NUM_NEW)
    assert_follows(zoo.load("llama")[0], seen, prompts_of(), policy=policy, budget=BUDGET, chunk=1 << 20)


def test_a_whole_prompt_is_read_again_in_one_step_after_a_preemption(zoo: Zoo) -> None:
    options = {"pattern": PATTERN, "num_blocks": 9, "max_model_len": 60}
    prompts, preempted = prompts_of([19, 13, 22]), []
    seen = run_budget(load(zoo, "llama_mha", "h2o", **WHOLE, **options), prompts, 16, preempted)
    heads = [np.flatnonzero(~retrieves).tolist() for retrieves in MASK]
    numbers = {"budget": BUDGET, "chunk": 1 << 20, "heads": heads}
    assert_follows(zoo.load("llama_mha")[0], seen, prompts, policy="h2o", **numbers)
    assert preempted


@pytest.mark.parametrize("policy", ["h2o", "tova"])
def test_heads_that_stream_under_a_pattern_have_the_budget_and_others_see_all(zoo: Zoo, policy: str) -> None:
    served = load(
        zoo, "llama_mha", policy, pattern=HeadPattern(MASK.astype(np.float32), 2, 3, retrieval=MASK)
    )
    seen = run_budget(served, prompts_of(), NUM_NEW)
    heads = [np.flatnonzero(~retrieves).tolist() for retrieves in MASK]
    numbers = {"budget": BUDGET, "chunk": CHUNK, "heads": heads}
    assert_follows(zoo.load("llama_mha")[0], seen, prompts_of(), policy=policy, **numbers)


@pytest.mark.parametrize(
    ("graphs", "policy"), crossed(["replay", CompileBackend("eager")], ["streaming-llm", "h2o", "tova"])
)
def test_captured_steps_follow_the_definition(zoo: Zoo, graphs: str | CompileBackend, policy: str) -> None:
    assert_served(zoo, "llama", policy, graphs=graphs, buckets=TABLE)


def test_what_is_kept_does_not_depend_on_who_else_runs(zoo: Zoo) -> None:
    together = run_budget(load(zoo, "llama", "h2o"), prompts_of(), NUM_NEW)
    served = load(zoo, "llama", "h2o", max_num_seqs=1, max_num_batched_tokens=CHUNK, max_chunk_rows=1)
    for prompt, seen in zip(prompts_of(), together):
        (alone,) = run_budget(served, [prompt], NUM_NEW)
        assert (alone.kept, alone.new) == (seen.kept, seen.new)


def test_a_preempted_request_comes_to_the_same_state_again(zoo: Zoo) -> None:
    served = load(zoo, "llama_mha", "h2o", pattern=PATTERN, num_blocks=9, max_model_len=60)
    prompts, preempted = prompts_of([19, 13, 22]), []
    seen = run_budget(served, prompts, 16, preempted)
    heads = [np.flatnonzero(~retrieves).tolist() for retrieves in MASK]
    numbers = {"budget": BUDGET, "chunk": CHUNK, "heads": heads}
    assert_follows(zoo.load("llama_mha")[0], seen, prompts, policy="h2o", **numbers)
    assert preempted


def test_stores_take_what_the_memory_plan_says_and_no_more_than_the_budget(zoo: Zoo) -> None:
    served = load(zoo, "llama_mha", "h2o", pattern=PATTERN, num_blocks=20)
    store = served.engine.runner.store
    dim, num_rows, blocks, slots = 8, len(LENGTHS) + 1, 0, 0
    for retrieves in MASK:
        blocks += int(retrieves.sum()) * 21 * BLOCK
        slots += int((~retrieves).sum()) * BUDGET
    # Keys and values in float32, a position and a score; the scratch of two prompt rows has none of these.
    expected = 2 * blocks * dim * 4 + slots * (num_rows * (2 * dim * 4 + 8) + 2 * 2 * dim * 4)
    assert store.num_bytes == store.plan.total_bytes == expected
    assert store.plan.row_bytes == slots * (2 * dim * 4 + 8)
    served.generate(prompts_of([30]), max_new_tokens=5, eos_token_id=None)
    (stats,), num_heads = served.stats().budgets, int((~MASK).sum())
    assert stats is not None
    assert (stats.policy, stats.num_slots, stats.num_heads) == ("h2o", BUDGET, num_heads)
    assert (stats.bytes_per_request, stats.held_bytes) == (store.plan.row_bytes, 0)
    assert stats.num_evictions == num_heads * (30 + 4 - BUDGET)


def test_positions_of_a_running_request_can_be_asked_for(zoo: Zoo) -> None:
    engine = load(zoo, "llama_mha", "streaming-llm:sink=2", pattern=PATTERN).engine
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add_request(prompts_of([20])[0], params, request_id="a")
    with pytest.raises(ValueError, match="id of a running request"):
        positions_of(engine, "a")
    for _ in range(5):
        engine.step()
    # 20 tokens of the prompt and one more, of which sinks and the newest ones are kept.
    found = positions_of(engine, "a")
    assert [len(layer) for layer in found] == (~MASK).sum(axis=1).tolist()
    assert all(head.tolist() == [0, 1, *range(14, 21)] for layer in found for head in layer)
    engine.abort("a")
    with pytest.raises(ValueError, match="id of a running request"):
        positions_of(engine, "a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trim_chunks": True, "graphs": "replay"}, "trim_chunks=False only"),
        ({"kv_chunk": 40}, "kv_chunk of 2 to 7 tokens"),
        ({"kv_budget": None}, "kv_policy and kv_budget or neither"),
        ({"kv_budget": 2.5}, "or a whole number of tokens, got 2.5"),
        ({"kv_policy": "h3o"}, "expected kv_policy to be one of"),
        ({"kv_policy": "h2o:recent=1.5"}, "recent in"),
        ({"kv_policy": "streaming-llm:sink=9"}, "a budget above 9 slots, got 9"),
        ({"kv_policy": "tova:protect=10"}, "at least 10 slots, got 9"),
        ({"kv_policy": "snapkv"}, "at least 32 slots, got 9"),
        ({"kv_policy": "snapkv:kernel=4"}, "an odd kernel"),
        ({"kv_policy": "fixed:stride=16,columns=1"}, "at least 20 tokens, got 9"),
        ({"kv_policy": "strided:stride=14"}, "at least 19 tokens, got 9"),
        ({"kv_policy": "fixed:stride=4,columns=5"}, "columns <= stride"),
        ({"kv_policy": "strided:stride=0"}, "stride >= 1"),
        ({"kv_prompt": "half"}, "one of chunks, whole, got 'half'"),
        ({**WHOLE, "enable_prefix_caching": True}, "does not support the prefix cache"),
    ],
)
def test_what_a_budget_does_not_serve_is_refused(zoo: Zoo, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(zoo, "llama", **{"policy": options.pop("kv_policy", "h2o"), **options})
