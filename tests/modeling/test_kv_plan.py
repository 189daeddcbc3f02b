"""Models whose heads keep what a plan says, head by head, follow the definition of each of its kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bias_builders import Window
from graphs import BucketTable
from hpu_duo import HPUDuoModel
from hpu_duo.kv_plan import Keep, KVPlan
from hpu_duo.steplog import options_of, read_log, replay
from kernels_ref import Blocks, Budget, Rings
from tests.bias_builders.plain_rules import plain
from tests.modeling.budget_driving import Seen, run_budget
from tests.modeling.budget_oracle import BudgetOracle, budget_logits
from tests.modeling.families import BLOCK, LENGTHS, Zoo, prompts_of

CHUNK, NUM_NEW = 6, 12
ALL, RING = Keep(), Keep("ring:sink=2,recent=5")
H2O, SMALL, TOVA = Keep("h2o", 9), Keep("h2o", 5), Keep("tova:protect=3", 9)
MIXED = KVPlan(
    (
        (ALL, RING, H2O, TOVA),
        (H2O, SMALL, H2O, SMALL),
        (TOVA, TOVA, ALL, H2O),
        (RING, RING, RING, RING),
    )
)
GROUPED = KVPlan(((H2O, ALL), (RING, TOVA), (SMALL, H2O), (ALL, ALL)))
SHARES = KVPlan(((Keep("streaming-llm:sink=2", 0.1),) * 4,) * 4)


class PlanOracle(BudgetOracle):
    """One text under a plan: the definition of each kind for the heads that have it."""

    plan: KVPlan

    def visible(self, layer: int, scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        num_heads, length, _ = scores.shape
        mask = torch.zeros(scores.shape, dtype=torch.bool)
        keeps, group, kept = self.plan.layers[layer], num_heads // self.num_kv, {}
        for keep in dict.fromkeys(keeps):
            mine = [head for head, each in enumerate(keeps) if each == keep]
            if keep.budget is None:
                rule = None if keep == ALL else Window(2, 5)
                pairs = [
                    [plain(rule, i, j) if rule else j <= i for j in range(length)] for i in range(length)
                ]
                found = torch.tensor(pairs).expand(scores.shape)
            else:
                heads = [mine] * len(self.plan.layers)
                one = BudgetOracle(keep.what, int(keep.budget), self.chunk, self.prompt_len, heads)
                one.num_kv = self.num_kv
                found = one.visible(layer, scores, sinks)
                kept.update(zip(mine, one.kept[layer]))
            for head in mine:
                own = slice(head * group, (head + 1) * group)
                mask[own] = found[own]
        self.kept[layer] = [kept.get(head, []) for head in range(len(keeps))]
        return mask


def load(zoo: Zoo, name: str, plan: KVPlan | Path, **options: Any) -> HPUDuoModel:
    defaults = {
        "max_num_seqs": len(LENGTHS),
        "max_num_batched_tokens": 2 * CHUNK + len(LENGTHS),
        "max_chunk_rows": 2,
        "max_model_len": 80,
        "kv_plan": plan,
        "kv_chunk": CHUNK,
        "enable_prefix_caching": False,
        "attention": "reference",
    }
    return HPUDuoModel.from_pretrained(zoo.load(name)[1], block_size=BLOCK, **{**defaults, **options})


def in_heads(served: HPUDuoModel, plan: KVPlan, layer: int, kept: list[list[int]]) -> list[list[int]]:
    """Positions by KV head of the model, from those by group."""
    found: dict[int, list[int]] = {}
    pending = iter(kept)
    for group in served.engine.runner.model.specs[layer].groups:
        if isinstance(group.kind, Budget):
            for head, keep in enumerate(plan.layers[layer]):
                is_named = keep.has_policy and keep.name == group.kind.policy.name
                if is_named and keep.budget == group.kind.budget:
                    found[head] = next(pending)
    assert next(pending, None) is None
    return [found.get(head, []) for head in range(plan.num_kv_heads)]


def assert_follows(
    zoo: Zoo, name: str, served: HPUDuoModel, plan: KVPlan, seen: list[Seen], chunk: int = CHUNK
) -> None:
    model, _ = zoo.load(name)
    for prompt, (new, logits, kept) in zip(prompts_of(), seen):
        definition = PlanOracle("", 0, chunk, len(prompt))
        definition.plan = plan
        expected = budget_logits(model, definition, [*prompt, *new[:-1]])[len(prompt) - 1 :]
        for layer, expected_kept in definition.kept.items():
            assert in_heads(served, plan, layer, kept[layer]) == expected_kept
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "plan"), [("llama_mha", MIXED), ("llama", GROUPED), ("qwen3", GROUPED), ("gemma2", GROUPED)]
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
        (MIXED, {"decode_len": 2}, "is served with decode_len=1 only"),
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
