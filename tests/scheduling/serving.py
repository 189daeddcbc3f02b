"""A scheduler that serves one step after the other, and what became of each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphs import StepLimits
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.request import Request
from hpu_duo.scheduling import SchedulingPolicy, make_policy
from tests.engine_host.planning import LIMITS, planned
from tests.engine_host.simulated_device import make_request

ROOMY = replace(LIMITS, max_num_batched_tokens=64, num_blocks=256)
ALONE = replace(ROOMY, max_num_seqs=1)
CACHING = replace(ROOMY, caches_prefixes=True, uses_rows=False)


class Serving:
    """Serves requests; every token is 5, so outputs are as long as ``max_tokens``.

    Attributes:
        ends: the step in which each request ended, by its name, from 1 on.
        admissions: names in the order of first admission.
    """

    def __init__(self, policy: SchedulingPolicy | str, limits: StepLimits = ROOMY) -> None:
        self.policy = make_policy(policy) if isinstance(policy, str) else policy
        self.scheduler = Scheduler(limits, policy=self.policy)
        self.num_steps = 0
        self.ends: dict[str, int] = {}
        self.admissions: list[str] = []
        self.num_displaced = 0

    def add(
        self,
        name: str,
        num_tokens: int = 5,
        prompt: int | Sequence[int] = 1,
        score: float = 0.0,
        **fields: object,
    ) -> Request:
        """Queue a request; a prompt may be a length."""
        tokens = [1] * prompt if isinstance(prompt, int) else prompt
        request = make_request(name, tokens, max_tokens=num_tokens, **fields)  # type: ignore[arg-type]
        request.score = score
        self.scheduler.add(request)
        return request

    def step(self) -> list[str]:
        """Serve a step; returns who had a share."""
        plan = planned(self.scheduler)
        self.num_steps += 1
        self.num_displaced += len(plan.preempted)
        names = [row.request.request_id for row in plan.rows]
        self.admissions += [name for name in names if name not in self.admissions]
        for done in self.scheduler.commit(plan, [5] * plan.num_samples):
            if done.finish_reason is not None:
                self.ends[done.request.request_id] = self.num_steps
        return names

    def finish(self, each_step: Callable[[], None] = lambda: None) -> Serving:
        """Serve to the end."""
        while self.scheduler.has_unfinished:
            self.step()
            each_step()
        return self

    @property
    def mean_end(self) -> float:
        """The mean step of the ends."""
        return sum(self.ends.values()) / len(self.ends)
