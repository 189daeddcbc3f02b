"""Random traffic under every policy: everything ends, with the tokens that it would have alone."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from graphs import StepLimits
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.request import Request
from hpu_duo.scheduling import POLICIES, make_policy
from tests.engine_host.prefix_draws import STEMS, prefix_limits
from tests.engine_host.simulated_device import VOCAB_SIZE, make_request
from tests.engine_host.test_prefix_properties import PrefixMachine

HURRIED = {
    "priority": "priority:patience=3",
    "sjf": "sjf:lengths=recent,patience=2",
    "mlfq": "mlfq:quantum=2,idle=3,period=2",
    "mlfq inner": "mlfq:quantum=4,idle=3,period=2,inner=srtf/ltr",
    "lpm": "lpm:window=2,patience=3",
    "dfs-weight": "dfs-weight:window=3,patience=inf",
    "vtc": "vtc:lengths=recent",
    "dlpm": "dlpm:quantum=3,window=2,patience=2",
    "preble": "preble:groups=3,window=4",
    "ltr": "ltr:idle=2,period=2",
}
"""Options that make rare things frequent."""


class PolicyMachine(PrefixMachine):
    """The machine of the prefix cache, with a policy, users, lengths and scores."""

    @initialize(limits=prefix_limits(), name=st.sampled_from([*POLICIES, *HURRIED.values()]))
    def create(self, limits: StepLimits, name: str) -> None:  # type: ignore[override]
        super().create(limits)
        self.scheduler = Scheduler(limits, policy=make_policy(name))

    @rule(
        stem=st.sampled_from(STEMS),
        tail=st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=5),
        max_tokens=st.integers(1, 10),
        priority=st.integers(-2, 2),
        user=st.sampled_from([None, "ann", "bob"]),
        expected_tokens=st.none() | st.integers(0, 12),
        score=st.floats(-2, 2),
    )
    def add_somebody(self, stem: list[int], tail: list[int], score: float, **fields: object) -> None:
        if not self.scheduler.policy.honours_priority:
            fields["priority"] = 0
        self.num_added += 1
        request = make_request(f"p{self.num_added}", [*stem, *tail], max_model_len=32, **fields)  # type: ignore[arg-type]
        request.score = score
        if self._is_taken(request):
            self._add(request)

    def _add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.unfinished[request.request_id] = request


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("name", [*POLICIES, *HURRIED.values()])
def test_a_policy_forgets_who_has_ended(name: str) -> None:
    """Nothing of 300 requests is left, but for what is known of users."""
    limits = StepLimits(
        max_num_seqs=3,
        max_num_batched_tokens=16,
        max_model_len=32,
        block_size=4,
        num_blocks=24,
        decode_len=1,
        max_chunk_rows=2,
        caches_prefixes=True,
        uses_rows=False,
    )
    policy = make_policy(name)
    scheduler = Scheduler(limits, policy=policy)
    for number in range(300):
        request = make_request(f"r{number}", [1 + number % 9] * 9, max_tokens=5, user=f"user{number % 7}")
        scheduler.add(request)
        if number % 3 == 0:
            scheduler.abort(f"r{number // 2}")
        if number % 2 == 0 and (plan := scheduler.plan()) is not None:
            scheduler.commit(plan, [5] * plan.num_samples)
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, [5] * plan.num_samples)
    assert not _requests_in(policy)


def _requests_in(held: object, depth: int = 3) -> list[Request]:
    """Requests that an object holds, in its attributes and containers."""
    if isinstance(held, Request):
        return [held]
    if depth == 0 or isinstance(held, str | int | float | type(None)):
        return []
    inside = [*getattr(held, "__dict__", {}).values()]
    if isinstance(held, dict):
        inside += [*held, *held.values()]
    elif isinstance(held, list | tuple | set):
        inside += held
    return [found for each in inside for found in _requests_in(each, depth - 1)]
