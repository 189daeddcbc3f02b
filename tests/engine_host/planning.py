"""Short ways to drive a scheduler by hand, and small limits for it."""

from __future__ import annotations

from graphs import StepLimits
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.request import Request
from tests.engine_host.simulated_device import make_request

LIMITS = StepLimits(
    max_num_seqs=4,
    max_num_batched_tokens=8,
    max_model_len=64,
    block_size=4,
    num_blocks=16,
    decode_len=1,
    max_chunk_rows=4,
)


def planned(scheduler: Scheduler) -> StepPlan:
    """The next step, which there must be."""
    plan = scheduler.plan()
    assert plan is not None
    return plan


def shares_of(plan: StepPlan) -> list[tuple[str, int, int]]:
    """Name, first token and number of new tokens of each row."""
    return [(row.request.request_id, row.start, row.num_new_tokens) for row in plan.rows]


def stepped(scheduler: Scheduler, token: int = 5) -> list[tuple[str, int, int]]:
    """Plan a step, and commit it with one token everywhere; returns its shares."""
    plan = planned(scheduler)
    scheduler.commit(plan, [token] * len(plan.sampled_rows))
    return shares_of(plan)


def add(scheduler: Scheduler, name: str, num_prompt_tokens: int, max_tokens: int = 8) -> Request:
    """Queue a request."""
    request = make_request(name, [1] * num_prompt_tokens, max_tokens=max_tokens)
    scheduler.add(request)
    return request
