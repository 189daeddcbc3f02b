"""Random traffic with drafters of every kind: outputs, pools and preemptions on a simulated device."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import StepLimits
from hpu_duo.engine.drafts import num_verified
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.request import Request
from tests.engine_host.simulated_device import (
    EOS,
    VOCAB_SIZE,
    SimulatedDevice,
    make_request,
    next_token,
    outputs_alone,
)

LENS = (1, 3, 5)
KINDS = ("right", "wrong", "half", "random", "end")


@dataclass
class Guessing:
    """Drafts of one kind."""

    kind: str
    rng: random.Random

    def propose(self, request: Request, most: int) -> Sequence[int]:
        known = request.tokens[: request.num_tokens].tolist()
        right: list[int] = []
        for _ in range(self.rng.randint(0, most)):
            right.append(next_token(known + right, request.sampling_seed))
        match self.kind:
            case "right":
                return right
            case "wrong":
                return [(token + 1) % VOCAB_SIZE for token in right]
            case "half":
                return [token if self.rng.random() < 0.7 else 1 for token in right]
            case "random":
                return [self.rng.randrange(VOCAB_SIZE) for _ in right]
        return [EOS for _ in right]

    def choose(self, found: Mapping[Request, Sized], num_rows: int, longest: int) -> int:
        return self.rng.choice([each for each in LENS if each <= longest])

    def skip(self, reason: str) -> None:
        pass


@dataclass
class Served:
    """Events so far."""

    num_steps: int = 0
    preempted: list[list[str]] = field(default_factory=list)


@st.composite
def limits_of(draw: st.DrawFn) -> StepLimits:
    max_num_seqs, caches = draw(st.integers(1, 4)), draw(st.booleans())
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs * LENS[-1] + draw(st.integers(0, 8)),
        max_model_len=64,
        block_size=draw(st.integers(2, 5)),
        num_blocks=draw(st.integers(14, 24)),
        decode_len=LENS[-1],
        draft_lens=draw(st.sampled_from([LENS, ()])),
        max_chunk_rows=draw(st.integers(1, 2)),
        caches_prefixes=caches,
        num_snapshots=2 if caches else 0,
    )


def serve(limits: StepLimits, prompts: Sequence[tuple[int, list[int]]], guessing: Guessing | None) -> Served:
    """Serve prompts, each from a step on, until all have ended with the outputs that they have alone."""
    scheduler, served = Scheduler(limits), Served()
    scheduler.drafting = guessing
    slack, waiting = LENS[-1] - 1, sorted(prompts, key=lambda each: each[0])
    device = SimulatedDevice(
        limits.num_blocks, limits.block_size, limits.num_ring_rows, uses_blocks=True, slack=slack
    )
    requests: list[Request] = []
    while waiting or scheduler.has_unfinished:
        while waiting and (waiting[0][0] <= served.num_steps or not scheduler.has_unfinished):
            prompt = waiting.pop(0)[1]
            request = make_request(
                f"r{len(requests)}", prompt, max_tokens=12, max_model_len=28, seed=len(requests)
            )
            requests.append(request)
            scheduler.add(request)
        plan = scheduler.plan()
        assert plan is not None
        assert plan.num_tokens <= limits.max_num_batched_tokens
        longest = max(row.num_new_tokens for row in plan.rows)
        if limits.draft_lens and longest > plan.decode_len:
            assert plan.decode_len == 1, "a step with prompts has no drafts"
        device.run(plan)
        served.num_steps += 1
        served.preempted.append([request.request_id for request in plan.preempted])
        ids = [
            next_token(row.request.tokens[:end].tolist(), row.request.sampling_seed)
            for row in plan.sampled_rows
            for end in range(row.end - row.num_samples + 1, row.end + 1)
        ]
        token_ids = np.array(ids, np.int32)
        scheduler.commit(plan, token_ids, num_verified(plan, token_ids, {}, None))
        for request in requests:
            if not request.is_finished and request.num_blocks:
                assert (request.num_blocks - 1) * limits.block_size < request.num_tokens
    for request in requests:
        assert request.output_token_ids.tolist() == outputs_alone(request)
    blocks = scheduler.allocations.blocks
    assert (blocks.num_used, scheduler.allocations.rows.num_used) == (0, 0)
    return served


PROMPTS = st.lists(
    st.tuples(st.integers(0, 12), st.lists(st.integers(1, 3), min_size=1, max_size=14)),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize(
    "num_examples",
    [40, pytest.param(4000, marks=[pytest.mark.slow, pytest.mark.exhaustive])],
)
def test_drafts_leave_outputs_and_pools_as_they_are(num_examples: int) -> None:
    @settings(max_examples=num_examples, deadline=None)
    @given(limits=limits_of(), prompts=PROMPTS, kind=st.sampled_from(KINDS), seed=st.integers(0, 99))
    def check(limits: StepLimits, prompts: list[tuple[int, list[int]]], kind: str, seed: int) -> None:
        with_drafts = serve(limits, prompts, Guessing(kind, random.Random(seed)))
        if kind == "wrong":
            # Rejected drafts cost no step, and nobody is preempted for them.
            assert with_drafts == serve(limits, prompts, None)

    check()
