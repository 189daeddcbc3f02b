"""Run requests through scheduler and runner by hand, to see logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpu_duo.engine.engine import Engine
from hpu_duo.engine.step_plan import ScheduledRow, StepPlan
from hpu_duo.request import Request
from hpu_duo.sampling import SamplingParams


def greedy_logits(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    forced: Sequence[Sequence[int]] | None = None,
) -> list[tuple[list[int], torch.Tensor]]:
    """New tokens and the logits behind them, float ``[num_new, V]``, of each prompt, all submitted at once.

    Args:
        forced: new tokens of each prompt, to take instead of the likeliest.
    """
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    requests = [Request(str(number), prompt, params, engine.limits) for number, prompt in enumerate(prompts)]
    seen: dict[str, list[torch.Tensor]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_unfinished:
        plan = engine.scheduler.plan()
        assert plan is not None
        logits = step_logits(engine, plan)
        for row in plan.sampled_rows:
            seen[row.request.request_id].append(logits[row.ring_row].clone())
        engine.scheduler.commit(plan, [_choose(row, logits, forced) for row in plan.sampled_rows])
    return [(r.output_token_ids.tolist(), torch.stack(seen[r.request_id])) for r in requests]


def step_logits(engine: Engine, plan: StepPlan) -> torch.Tensor:
    """The logits of a plan, float ``[N * M, V]``, ring row after ring row; nothing is sampled."""
    return engine.runner.executor.logits(engine.runner.builder.build(plan, {}).message).float()


def _choose(row: ScheduledRow, logits: torch.Tensor, forced: Sequence[Sequence[int]] | None) -> int:
    if forced is None:
        return int(logits[row.ring_row].argmax())
    return forced[int(row.request.request_id)][row.request.num_output_tokens]


@torch.inference_mode()
def teacher_forced(model: torch.nn.Module, prompt: Sequence[int], new: Sequence[int]) -> torch.Tensor:
    """transformers' logits at the same places, in one forward without a cache, float ``[len(new), V]``."""
    tokens = torch.tensor([[*prompt, *new]])
    output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    logits: torch.Tensor = output.logits[0, len(prompt) - 1 : -1].float()
    return logits
