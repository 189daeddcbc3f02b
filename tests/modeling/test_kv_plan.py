"""Models whose heads keep what a plan says, head by head, follow the definition of each of its kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graphs import BucketTable
from hpu_duo import HPUDuoModel
from hpu_duo.config.kv_plan import Keep, KVPlan
from hpu_duo.lab.replay import replay
from hpu_duo.startup.recorded_steps import options_of, read_log
from kernels_ref import Blocks, Budget, Rings
from tests.modeling.budget_driving import run_budget
from tests.modeling.families import BLOCK, LENGTHS, Zoo, prompts_of
from tests.modeling.plan_driving import ALL, CHUNK, GROUPED, MIXED, assert_follows, load
from tests.tiers import further

NUM_NEW = 12
SHARES = KVPlan(((Keep("streaming-llm:sink=2", 0.1),) * 4,) * 4)


@pytest.mark.parametrize(
    ("name", "plan"),
    [("llama_mha", MIXED), ("llama", GROUPED), *further(("qwen3", GROUPED), ("gemma2", GROUPED))],
)
def test_heads_of_several_kinds_in_one_layer_follow_their_definitions(
    zoo: Zoo, name: str, plan: KVPlan
) -> None:
    served = load(zoo, name, plan)
    assert_follows(zoo, name, served, plan, run_budget(served, prompts_of(), NUM_NEW))


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "sdpa"},
        {"graphs": "replay", "buckets": BucketTable.from_strings(["csu/q20/s24/u24/l6"])},
        {"max_num_seqs": 2, "max_num_batched_tokens": CHUNK + 1, "max_chunk_rows": 1},
    ],
)
def test_kernels_captures_and_limits_do_not_change_what_is_kept(zoo: Zoo, options: dict[str, Any]) -> None:
    served = load(zoo, "llama_mha", MIXED, **options)
    assert_follows(zoo, "llama_mha", served, MIXED, run_budget(served, prompts_of(), NUM_NEW))


def test_whole_prompts_are_cut_once_by_every_budget(zoo: Zoo) -> None:
    whole = {"kv_prompt": "whole", "kv_chunk": None, "max_num_batched_tokens": 80 + len(LENGTHS)}
    served = load(zoo, "llama_mha", MIXED, **whole)
    seen = run_budget(served, prompts_of(), NUM_NEW)
    assert_follows(zoo, "llama_mha", served, MIXED, seen, chunk=1 << 20)


def test_prefixes_are_taken_up_at_the_ends_of_chunks(zoo: Zoo) -> None:
    options = {"kv_chunk": 2 * BLOCK, "max_num_batched_tokens": 64}
    cold = load(zoo, "llama_mha", MIXED, **options)
    warm = load(zoo, "llama_mha", MIXED, **options, enable_prefix_caching=True)
    prompts = prompts_of([40, 33])
    expected = cold.generate(prompts, max_new_tokens=9, eos_token_id=None)
    for _ in range(2):
        assert torch.equal(warm.generate(prompts, max_new_tokens=9, eos_token_id=None), expected)
    prefixes = warm.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_hit_tokens > 0


def test_stores_take_what_the_plan_says_and_statistics_tell_each_budget(zoo: Zoo, tmp_path: Path) -> None:
    MIXED.save(tmp_path / "plan.yaml")
    served = load(zoo, "llama_mha", tmp_path / "plan.yaml")
    kinds = [
        {group.kind: group.num_heads for group in spec.groups} for spec in served.engine.runner.model.specs
    ]
    assert [[type(kind) for kind in layer] for layer in kinds] == [
        [Blocks, Rings, Budget, Budget],
        [Budget, Budget],
        [Blocks, Budget, Budget],
        [Rings],
    ]
    served.generate(prompts_of([30]), max_new_tokens=5, eos_token_id=None)
    store = served.engine.runner.store
    assert store.num_bytes == store.plan.total_bytes
    stats = {(each.policy, each.num_slots): each for each in served.stats().budgets}
    assert {key: each.num_heads for key, each in stats.items()} == {
        ("h2o", 9): 4,
        ("h2o", 5): 2,
        ("tova", 9): 3,
    }
    assert stats["h2o", 5].num_evictions == 2 * (30 + 4 - 5)
    assert stats["tova", 9].num_evictions == 3 * (30 + 4 - 9)


def test_budgets_may_be_shares_and_recorded_steps_hold_the_plan(zoo: Zoo, tmp_path: Path) -> None:
    served = load(zoo, "llama_mha", SHARES, record_steps=tmp_path / "steps")
    (stats,) = served.stats().budgets
    assert (stats.policy, stats.num_slots, stats.num_heads) == ("streaming-llm", 8, 16)
    served.generate(prompts_of([20]), max_new_tokens=3, eos_token_id=None)
    served.engine.step_recorder.close()  # type: ignore[union-attr]
    log, path = read_log(tmp_path / "steps"), zoo.load("llama_mha")[1]
    again = HPUDuoModel.from_pretrained(path, **options_of(log.origin))
    assert replay(again.engine, path, log).differences == ()


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (GROUPED, {}, "expected a kv_plan of 4 layers with (4,) KV heads, got 4 layers with 2"),
        (MIXED, {"kv_policy": "h2o", "kv_budget": 9}, "expected kv_policy or kv_plan, got"),
        (MIXED, {"attention_rule": "band:width=9"}, "attention_rule=None only"),
        (MIXED, {"max_layer_kinds": 3}, "at most max_layer_kinds=3 kinds of layers, got 4"),
        (KVPlan(((ALL,) * 4,) * 4), {}, "kv_plan is served with kv_chunk=None and kv_prompt='chunks'"),
        (
            KVPlan(((Keep("ring:sinks=2"),) * 4,) * 4),
            {"kv_chunk": None},
            "options of what a head keeps 'ring'",
        ),
        (KVPlan(((Keep("h3o", 4),) * 4,) * 4), {}, "expected kv_policy to be one of"),
    ],
)
def test_plans_that_do_not_fit_are_refused(
    zoo: Zoo, plan: KVPlan, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        load(zoo, "llama_mha", plan, **options)
    assert message in str(caught.value)
