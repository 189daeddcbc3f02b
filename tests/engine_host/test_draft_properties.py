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
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.request import FinishReason, Request
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


def carry_out(scheduler: Scheduler, device: SimulatedDevice, plan: StepPlan) -> None:
    """Run a step, and commit what it samples and verifies."""
    device.run(plan)
    ids = [
        next_token(row.request.tokens[:end].tolist(), row.request.sampling_seed)
        for row in plan.sampled_rows
        for end in range(row.end - row.num_samples + 1, row.end + 1)
    ]
    token_ids = np.array(ids, np.int32)
    scheduler.commit(plan, token_ids, num_verified(plan, token_ids, {}, None))


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
        served.num_steps += 1
        served.preempted.append([request.request_id for request in plan.preempted])
        carry_out(scheduler, device, plan)
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


class Walk:
    """A scheduler with its device, to which requests come and go at random."""

    def __init__(self, limits: StepLimits, guessing: Guessing | None) -> None:
        self.limits, self.scheduler = limits, Scheduler(limits)
        self.scheduler.drafting = guessing
        self._device = SimulatedDevice(
            limits.num_blocks, limits.block_size, limits.num_ring_rows, uses_blocks=True, slack=LENS[-1] - 1
        )
        self.open: dict[str, Request] = {}
        self.num_steps = 0

    def add(self, name: str, prompt: Sequence[int], most: int, seed: int) -> None:
        """Add a request."""
        request = make_request(name, prompt, max_tokens=most, max_model_len=28, seed=seed)
        self.open[name] = request
        self.scheduler.add(request)

    def step(self) -> list[str] | None:
        """Run a step; names of preempted requests, None if there is nothing to do."""
        plan = self.scheduler.plan()
        if plan is None:
            return None
        carry_out(self.scheduler, self._device, plan)
        self.num_steps += 1
        for name in [name for name, request in self.open.items() if request.is_finished]:
            request = self.open.pop(name)
            assert request.output_token_ids.tolist() == outputs_alone(request)
        return [request.request_id for request in plan.preempted]

    def end(self, name: str, *, aborts: bool) -> None:
        """Abort a request, or end it by a stop string, in both of which its drafts go too."""
        request = self.open.pop(name)
        if aborts:
            self.scheduler.abort(name)
        elif request.num_output_tokens:
            self.scheduler.finish(request, FinishReason.STOP)
        else:
            self.open[name] = request

    def check(self) -> None:
        """Rows and blocks belong to running requests and to the prefix cache, and to nobody else."""
        rows, blocks = self.scheduler.allocations.rows, self.scheduler.allocations.blocks
        held = {
            int(block)
            for request in self.open.values()
            for block in request.block_table[: request.num_blocks]
        }
        assert rows.num_used == self.scheduler.num_running <= len(self.open)
        assert blocks.num_used == len(held)
        for request in self.open.values():
            assert (request.num_blocks - 1) * self.limits.block_size < request.num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "num_operations", [600, pytest.param(100_000 // len(KINDS), marks=pytest.mark.exhaustive)]
)
def test_a_long_walk_leaks_nothing_and_preempts_nobody_for_drafts(kind: str, num_operations: int) -> None:
    """Rejected drafts change no event, and a batch takes no more steps than without drafts.

    Where memory is short, accepted tokens fill blocks in another order than plain decodes, which may cost
    a step or two.
    """
    rng, done = random.Random(num_operations), 0
    while done < num_operations:
        limits = StepLimits(
            max_num_seqs=4,
            max_num_batched_tokens=4 * LENS[-1] + rng.randint(0, 8),
            max_model_len=64,
            block_size=rng.randint(2, 5),
            num_blocks=rng.randint(14, 24),
            decode_len=LENS[-1],
            draft_lens=LENS,
            max_chunk_rows=rng.randint(1, 2),
            caches_prefixes=(caches := rng.random() < 0.5),
            num_snapshots=2 if caches else 0,
        )
        own, plain = Walk(limits, Guessing(kind, random.Random(done))), Walk(limits, None)
        for number in range(rng.randint(1, 7)):
            prompt = [rng.randint(1, 3) for _ in range(rng.randint(1, 14))]
            for walk in (own, plain):
                walk.add(f"r{number}", prompt, 12, number)
            done += 1
        preempted: list[str] = []
        for walk in (own, plain):
            while (names := walk.step()) is not None:
                walk.check()
                preempted += names
                done += walk is own
            assert not walk.open
        assert own.num_steps <= plain.num_steps + 2 * bool(preempted and kind != "wrong")
        for number in range(7, 120):
            done += 1
            choice = rng.random()
            if choice < 0.3:
                prompt, most = [rng.randint(1, 3) for _ in range(rng.randint(1, 14))], rng.randint(1, 12)
                for walk in (own, plain):
                    walk.add(f"r{number}", prompt, most, number)
            elif choice < 0.4 and (both := sorted(own.open.keys() & plain.open.keys())):
                name, aborts = rng.choice(both), rng.random() < 0.5
                for walk in (own, plain):
                    walk.end(name, aborts=aborts)
            else:
                events = [walk.step() for walk in (own, plain)]
                assert events[0] == events[1] or kind != "wrong"
            own.check()
