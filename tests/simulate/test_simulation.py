"""The scheduler on a virtual clock: the steps of the engine, no request lost, nothing beyond the limits."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphs import BatchShape, BucketTable, GraphMissError, StepLimits
from hpu_duo.engine.engine import Engine
from hpu_duo.engine.scheduler import ChunkTrimming, Scheduler
from hpu_duo.kv.prefix_tree import digest_of
from hpu_duo.kv.tiers.host import RecordKey
from hpu_duo.lab.simulate.offload import SimulatedHost
from hpu_duo.planning.simulation import (
    SimulatedEngine,
    SimulatedStep,
    Simulation,
    SyntheticDrafts,
    VirtualTime,
)
from hpu_duo.request import FinishReason, Request, TokenLimits
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, make_tiny

Drawn = list[tuple[float, int, int, int]]
"""Of each prompt: time, prompt tokens, output tokens, samples."""

LIMITS = StepLimits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=64,
    block_size=4,
    num_blocks=32,
    max_chunk_rows=1,
    decode_len=1,
)


def drawn(longest: int) -> st.SearchStrategy[Drawn]:
    one = st.tuples(
        st.integers(0, 30).map(float), st.integers(1, longest - 13), st.integers(1, 12), st.integers(1, 3)
    )
    return st.lists(one, max_size=10)


def params_of(num_outputs: int, is_forced: bool, **others: int) -> SamplingParams:
    forced = (3,) * num_outputs if is_forced else ()
    return SamplingParams(max_tokens=num_outputs, ignore_eos=True, forced_token_ids=forced, **others)


class Trace:
    """Arrivals at given times, independent of other requests.

    Args:
        requests: pairs of time and request; siblings have the time of their parent and follow it in the list.
            Requests of the same time arrive in this order.
    """

    def __init__(self, requests: Iterable[tuple[float, Request]]) -> None:
        self._coming = deque(sorted(requests, key=lambda coming: coming[0]))

    def due(self, now: float) -> list[Request]:
        """Return the requests that have arrived."""
        found = []
        while self._coming and self._coming[0][0] <= now:
            found.append(self._coming.popleft()[1])
        return found

    def next_time(self) -> float | None:
        """Return the time of the first request that is left."""
        return self._coming[0][0] if self._coming else None

    def ended(self, request: Request, now: float) -> None:
        """Do nothing: no request of a trace waits for the end of another one."""


def trace(asked: Drawn, limits: StepLimits, is_forced: bool = False) -> list[tuple[float, Request]]:
    coming: list[tuple[float, Request]] = []
    for number, (time, num_prompt, num_outputs, num_samples) in enumerate(asked):
        params = params_of(num_outputs, is_forced)
        first = Request(f"r{number}", [1] * num_prompt, params, TokenLimits(limits.max_model_len))
        coming.append((time, first))
        for index in range(1, num_samples):
            name = f"r{number}.{index}"
            coming.append((time, first.sibling(name, sample_index=index, sampling_seed=index)))
    return coming


def one_unit(bucket: BatchShape) -> float:
    return 1.0


def simulated(
    limits: StepLimits,
    coming: list[tuple[float, Request]],
    duration_of: Callable[[BatchShape], float] = one_unit,
    table: BucketTable | None = None,
    trims: bool = False,
) -> list[SimulatedStep]:
    trimming = ChunkTrimming(table, limits.block_size).num_postponed if table is not None and trims else None
    return list(
        Simulation(SimulatedEngine(Scheduler(limits, trimming), duration_of, table), Trace(coming)).steps()
    )


class Shapes(list[BatchShape]):
    """Notes the shape of every step, in place of a recorder."""

    path = None

    def add(self, shape: BatchShape) -> None:
        self.append(shape)


def served(engine: Engine, asked: Drawn, is_forced: bool) -> list[BatchShape]:
    """The shapes of the engine's steps when prompts are added before the step of their time."""
    engine.recorder = shapes = Shapes()  # type: ignore[assignment]
    coming, now = sorted(asked, key=lambda one: one[0]), 0.0
    while coming or engine.has_unfinished:
        if not engine.has_unfinished:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            _, num_prompt, num_outputs, num_samples = coming.pop(0)
            engine.add_request([1] * num_prompt, params_of(num_outputs, is_forced, n=num_samples, seed=3))
        engine.step()
        now += 1
    engine.recorder = None
    return list(shapes)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """Few blocks, so that requests are preempted; prompts that end at borders; forced tokens by four.

    Only forced tokens are known to a simulation, and what a cache keeps depends on tokens.
    """
    tiny: Tiny = make_tiny(tmp_path_factory.mktemp("tiny"))
    cold = partial(tiny.load, pattern=PATTERN, enable_prefix_caching=False)
    exact = cold(num_blocks=16, max_num_seqs=3, max_chunk_rows=2)
    trimmed = cold(num_blocks=32, graphs="replay", trim_chunks=True)
    verified = cold(num_blocks=24, decode_len=4)
    cached = tiny.load(pattern=PATTERN, num_blocks=24, num_prefix_snapshots=3)
    return {
        "exact": exact.engine,
        "trimmed": trimmed.engine,
        "verified": verified.engine,
        "cached": cached.engine,
    }


@pytest.mark.parametrize(
    "name", ["exact", pytest.param("trimmed", marks=pytest.mark.slow), "verified", "cached"]
)
@given(asked=drawn(48))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_simulation_runs_the_steps_that_the_engine_runs(
    engines: dict[str, Engine], name: str, asked: Drawn
) -> None:
    engine = engines[name]
    limits, table = engine.scheduler.limits, engine.runner.graphs.table
    is_forced = name in ("verified", "cached")
    if (prefixes := engine.scheduler.allocations.prefixes) is not None:
        prefixes.clear()
    coming = trace(asked, limits, is_forced)
    steps = simulated(limits, coming, table=table if len(table) else None, trims=name == "trimmed")
    assert [step.shape for step in steps] == served(engine, asked, is_forced)


@st.composite
def some_limits(draw: st.DrawFn) -> StepLimits:
    max_num_seqs, decode_len = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs * decode_len + draw(st.integers(0, 12)),
        max_model_len=40,
        block_size=draw(st.sampled_from([1, 4])),
        num_blocks=draw(st.integers(40, 60)),
        uses_blocks=draw(st.sampled_from([True, True, False])),
        max_chunk_rows=draw(st.integers(1, 3)),
        decode_len=decode_len,
    )


@given(limits=some_limits(), asked=drawn(40), pace=st.sampled_from([0.1, 1.0, 7.0]), is_forced=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_request_gets_its_tokens_once_and_no_step_exceeds_the_limits(
    limits: StepLimits, asked: Drawn, pace: float, is_forced: bool
) -> None:
    coming = trace(asked, limits, is_forced)
    scheduler = Scheduler(limits)
    simulation = Simulation(SimulatedEngine(scheduler, lambda bucket: pace * bucket.query_len), Trace(coming))
    arrived = {request.request_id: time for time, request in coming}
    tokens, ended, busy_until = Counter[str](), Counter[str](), 0.0
    for step in simulation.steps():
        assert limits.reaches(step.shape)
        assert step.bucket == step.shape
        assert 0 < len(step.plan.rows) <= limits.max_num_seqs
        assert step.plan.num_tokens == step.shape.query_len <= limits.max_num_batched_tokens
        chunks = [row for row in step.plan.rows if row.num_new_tokens > limits.decode_len and row.start > 0]
        assert len(chunks) <= limits.max_chunk_rows
        assert scheduler.allocations.blocks.num_used <= limits.num_blocks
        # Time passes only while somebody is served, or until somebody comes.
        assert step.start == busy_until or step.start in arrived.values()
        assert step.start >= busy_until
        assert all(arrived[row.request.request_id] <= step.start for row in step.plan.rows)
        assert step.duration == pace * step.shape.query_len
        busy_until = step.end
        tokens.update(done.request.request_id for done in step.committed)
        ended.update(done.request.request_id for done in step.committed if done.finish_reason)
    wanted = {request.request_id: len(request.tokens) - request.num_prompt_tokens for _, request in coming}
    assert tokens == Counter(wanted)
    assert ended == Counter(arrived.keys())
    assert all(request.finish_reason is FinishReason.LENGTH for _, request in coming)
    assert not scheduler.has_unfinished
    assert scheduler.allocations.blocks.num_used == scheduler.allocations.rows.num_used == 0
    assert simulation.now == busy_until


def test_the_clock_jumps_to_the_next_arrival_and_steps_begin_before_the_end() -> None:
    coming = trace([(0.0, 3, 2, 1), (100.0, 3, 2, 1)], LIMITS)
    simulation = Simulation(SimulatedEngine(Scheduler(LIMITS), one_unit), Trace(coming))
    assert [step.start for step in simulation.steps(until=100)] == [0.0, 1.0]
    assert [step.start for step in simulation.steps(until=101)] == [100.0]
    assert [step.start for step in simulation.steps()] == [101.0]
    assert simulation.now == 102.0


def test_who_comes_during_a_step_is_served_by_the_next_one() -> None:
    steps = simulated(LIMITS, trace([(0.0, 3, 3, 1), (0.5, 3, 1, 1)], LIMITS))
    assert [len(step.plan.rows) for step in steps] == [1, 2, 1]


def test_a_step_takes_the_time_of_its_bucket() -> None:
    table = BucketTable.from_strings(["csu/q4/s32/u32/l4", "csu/q16/s32/u32/l4"])
    steps = simulated(LIMITS, trace([(0.0, 7, 3, 1)], LIMITS), lambda bucket: 2.0 * bucket.query_len, table)
    assert [step.shape.query_len for step in steps] == [7, 1, 1]
    assert [step.bucket for step in steps] == [table.buckets[1], table.buckets[0], table.buckets[0]]
    assert [step.start for step in steps] == [0.0, 32.0, 40.0]


def test_a_step_without_a_bucket_and_one_without_a_duration_are_refused() -> None:
    coming = trace([(0.0, 7, 3, 1)], LIMITS)
    with pytest.raises(GraphMissError, match="no bucket holds c--/q7"):
        simulated(LIMITS, coming, table=BucketTable.from_strings(["csu/q4/s32/u32/l4"]))
    with pytest.raises(ValueError, match="expected a duration above 0 for c--/q7/s0/u0/l1, got 0"):
        simulated(LIMITS, trace([(0.0, 7, 3, 1)], LIMITS), lambda bucket: 0.0)


def test_nothing_of_requests_that_have_ended_is_stored_for_drafts() -> None:
    limits = replace(LIMITS, decode_len=4, draft_lens=(1, 4))
    drafts = SyntheticDrafts(limits.draft_lens, 3.0)
    engine = SimulatedEngine(Scheduler(limits), one_unit, drafts=drafts)
    asked: Drawn = [(0.0, 5, 12, 2), (3.0, 4, 12, 1)]
    steps = list(Simulation(engine, Trace(trace(asked, limits))).steps())
    assert any(row.num_samples > 1 for step in steps for row in step.plan.rows)
    assert not drafts._lengths._of


@pytest.mark.parametrize("rate", [8e9, 32e9, 64e9])
def test_a_prefix_comes_back_in_the_time_of_the_link_or_of_the_steps_beside_it(rate: float) -> None:
    """A step of 1 ms begins 16 blocks, which take 4.4, 1.1 and 0.55 ms; no step waits for them."""
    step_s, num_blocks, each_way = 1e-3, 1600, 16
    limits = replace(
        LIMITS,
        max_num_batched_tokens=64,
        max_model_len=8000,
        num_blocks=4000,
        caches_prefixes=True,
        uses_rows=False,
    )
    host = SimulatedHost(num_blocks, 2_200_000, 0, rate)
    staged = host.staged(limits)
    assert staged.num_staged_blocks == 2 * each_way
    scheduler, time = Scheduler(staged), VirtualTime()
    engine = SimulatedEngine(scheduler, lambda _: step_s, link=host.attach(scheduler, time), time=time)
    document = Request(
        "document", list(range(4 * num_blocks + 1)), params_of(1, is_forced=False), TokenLimits(8000)
    )
    allocations, tokens = scheduler.allocations, document.tokens
    assert allocations.tiers is not None
    assert allocations.prefixes is not None
    tree = allocations.prefixes.tree
    digest = tree.root(document.namespace).digest
    for ordinal in range(num_blocks):
        parent, digest = digest, digest_of(digest, tree.key(tokens, ordinal))
        record = allocations.tiers.host.reserve(RecordKey(digest, False), parent, 4, 4 * (ordinal + 1), 1)
        assert record is not None
        record.is_present = True
    engine.add(Request("other", [1] * 8, params_of(7000, is_forced=False), TokenLimits(8000)))
    first = engine.step(0.0)
    engine.add(document)
    began = at = first.start + first.duration
    while document.num_computed_tokens < 4 * num_blocks:
        step = engine.step(at)
        at = step.start + step.duration
    assert engine.stalled == 0
    assert allocations.tiers.counters.num_loaded == num_blocks
    compute, link = num_blocks / each_way * step_s, num_blocks * host.block_bytes / rate
    assert at - began == pytest.approx(max(compute, link), rel=0.02)
