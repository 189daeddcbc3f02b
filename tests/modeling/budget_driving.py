"""Drive requests of an engine with a KV budget by hand, and compare them with the definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpu_duo import HPUDuoModel
from hpu_duo.lab.kept_tokens import kept_positions
from hpu_duo.request import Request
from hpu_duo.sampling import SamplingParams
from tests.modeling.budget_oracle import BudgetOracle, budget_logits
from tests.modeling.driving import step_logits
from tests.modeling.families import BLOCK, LENGTHS

BUDGET, CHUNK, NUM_NEW = 9, 6, 12


def load_budget(path: Path, policy: str, **options: Any) -> HPUDuoModel:
    """Serve a checkpoint with few slots and two small chunks a step, unless told otherwise."""
    defaults = {
        "max_num_seqs": len(LENGTHS),
        "max_num_batched_tokens": 2 * CHUNK + len(LENGTHS),
        "max_chunk_rows": 2,
        "max_model_len": 80,
        "kv_policy": policy,
        "kv_budget": BUDGET,
        "kv_chunk": CHUNK,
        "enable_prefix_caching": False,
        "attention": "reference",
    }
    return HPUDuoModel.from_pretrained(path, block_size=BLOCK, **{**defaults, **options})


class Seen(NamedTuple):
    """Outcome of a prompt: new tokens, the logits behind them, and the positions each head keeps."""

    new: list[int]
    logits: torch.Tensor
    kept: list[list[list[int]]]


def run_budget(
    served: HPUDuoModel,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    preempted: list[str] | None = None,
) -> list[Seen]:
    """Serve prompts together, greedily, up to ``num_new`` tokens each.

    Args:
        preempted: gets the id of a request each time that it is preempted.
    """
    engine = served.engine
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    requests = [Request(str(number), prompt, params, engine.limits) for number, prompt in enumerate(prompts)]
    logits: dict[str, list[torch.Tensor]] = {request.request_id: [] for request in requests}
    kept: dict[str, list[list[list[int]]]] = {}
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_unfinished:
        plan = engine.scheduler.plan()
        assert plan is not None
        if preempted is not None:
            preempted += [request.request_id for request in plan.preempted]
        step = step_logits(engine, plan)
        for row in plan.rows:
            found = kept_positions(engine.runner.store, row.ring_row, row.end)
            kept[row.request.request_id] = [[head.tolist() for head in layer] for layer in found]
        for row in plan.sampled_rows:
            logits[row.request.request_id].append(step[row.ring_row].clone())
        engine.scheduler.commit(plan, [int(step[row.ring_row].argmax()) for row in plan.sampled_rows])
    return [
        Seen(r.output_token_ids.tolist(), torch.stack(logits[r.request_id]), kept[r.request_id])
        for r in requests
    ]


def assert_follows(
    model: Any, seen: Sequence[Seen], prompts: Sequence[Sequence[int]], atol: float = 1e-4, **oracle: Any
) -> None:
    """Compare kept positions, logits and tokens with the definition."""
    for prompt, (new, logits, kept) in zip(prompts, seen):
        text = [*prompt, *new[:-1]]
        definition = BudgetOracle(prompt_len=len(prompt), **oracle)
        expected = budget_logits(model, definition, text)[len(prompt) - 1 :]
        assert [kept[layer] for layer in sorted(definition.kept)] == [
            definition.kept[layer] for layer in sorted(definition.kept)
        ]
        torch.testing.assert_close(logits, expected, atol=atol, rtol=0)
        assert new == expected.argmax(dim=-1).tolist()
