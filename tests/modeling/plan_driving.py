"""Engines under a KV plan, and the definition of what each of their heads keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bias_builders import Window
from hpu_duo import HPUDuoModel
from hpu_duo.config.kv_plan import Keep, KVPlan
from kernels_ref import Budget
from tests.bias_builders.plain_rules import plain
from tests.modeling.budget_driving import Seen
from tests.modeling.budget_oracle import BudgetOracle, budget_logits
from tests.modeling.families import BLOCK, LENGTHS, Zoo, prompts_of

CHUNK = 6
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
    """Serve a model under a plan with small blocks, chunks and steps unless told otherwise."""
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
    zoo: Zoo,
    name: str,
    served: HPUDuoModel,
    plan: KVPlan,
    seen: Sequence[Seen],
    chunk: int = CHUNK,
    prompts: Sequence[Sequence[int]] | None = None,
) -> None:
    """Compare kept positions, logits and tokens with the definition of each head's kind."""
    model, _ = zoo.load(name)
    for prompt, (new, logits, kept) in zip(prompts_of() if prompts is None else prompts, seen, strict=True):
        definition = PlanOracle("", 0, chunk, len(prompt))
        definition.plan = plan
        expected = budget_logits(model, definition, [*prompt, *new[:-1]])[len(prompt) - 1 :]
        for layer, expected_kept in definition.kept.items():
            assert in_heads(served, plan, layer, kept[layer]) == expected_kept
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert new == expected.argmax(dim=-1).tolist()
