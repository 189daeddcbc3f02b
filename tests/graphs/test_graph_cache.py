from collections.abc import Callable, Hashable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from graphs import (
    BatchShape,
    BucketTable,
    EagerBackend,
    GraphCache,
    GraphMissError,
    MissPolicy,
)
from graphs.backends.compile import CompileBackend
from graphs.backends.replay import ReplayBackend

B8 = BatchShape.parse("--u/q8/s0/u8/l8")
B16 = BatchShape.parse("--u/q16/s0/u16/l16")
PREFILL = BatchShape.parse("c--/q64/s0/u0/l1")
TABLE = BucketTable((B8, B16, PREFILL))
OUTSIDE = BatchShape.parse("--u/q20/s0/u1/l20")

Inputs = Mapping[str, torch.Tensor]


class RecordingBackend:
    """A whole-step backend that keeps a list of the shapes it captured."""

    name = "recording"
    num_first_runs = 1

    def __init__(self) -> None:
        self.captured: list[BatchShape] = []
        self.regions: list[tuple[BatchShape, Hashable]] = []

    def problem(self, device: torch.device) -> str | None:
        return None

    def capture(self, fn: Callable[[Inputs], Any], shape: BatchShape) -> Callable[[Inputs], Any]:
        self.captured.append(shape)
        return lambda inputs: ("captured", fn(inputs))

    def region(self, shape: BatchShape, key: Hashable, fn: Any) -> Any:
        self.regions.append((shape, key))
        return lambda *args: ("region", fn(*args))


def make_inputs(bucket: BatchShape) -> Inputs:
    return {"token_ids": torch.arange(bucket.query_len)}


def total(inputs: Inputs) -> int:
    return int(inputs["token_ids"].sum())


def make_cache(policy: MissPolicy = MissPolicy.ERROR) -> tuple[GraphCache, RecordingBackend]:
    backend = RecordingBackend()
    return GraphCache(backend, TABLE, policy), backend


def test_a_bucket_is_captured_at_its_first_run_only() -> None:
    cache, backend = make_cache()
    for _ in range(3):
        bucket = cache.resolve(BatchShape.parse("--u/q5/s0/u2/l5"))
        assert cache.run(bucket, total, make_inputs(bucket)) == ("captured", 28)
    assert backend.captured == [B8]
    counters = cache.counters
    assert (counters.hits, counters.misses, counters.captures) == (3, 0, 1)
    assert counters.runs == {B8: 3}
    assert counters.steps == {"--u": 3}


def test_a_miss_raises_under_the_error_policy_and_names_the_nearest_buckets() -> None:
    cache, _ = make_cache()
    with pytest.raises(
        GraphMissError, match="no bucket holds --u/q20/s0/u1/l20; nearest buckets: --u/q16"
    ) as e:
        cache.resolve(OUTSIDE)
    assert e.value.miss.shape == OUTSIDE
    assert cache.counters.misses == 1


def test_a_miss_becomes_a_bucket_under_the_capture_policy() -> None:
    cache, backend = make_cache(MissPolicy.CAPTURE)
    assert cache.resolve(OUTSIDE) == OUTSIDE
    cache.run(OUTSIDE, total, make_inputs(OUTSIDE))
    assert cache.resolve(BatchShape.parse("--u/q19/s0/u1/l19")) == OUTSIDE
    assert backend.captured == [OUTSIDE]
    assert (cache.counters.hits, cache.counters.misses) == (1, 1)


def test_a_miss_runs_uncaptured_at_its_exact_shape_under_the_eager_policy() -> None:
    cache, backend = make_cache(MissPolicy.EAGER)
    for _ in range(2):
        assert cache.resolve(OUTSIDE) == OUTSIDE
        assert cache.run(OUTSIDE, total, make_inputs(OUTSIDE)) == 190
    assert backend.captured == []
    counters = cache.counters
    assert (counters.misses, counters.eager_runs, counters.captures) == (2, 2, 0)
    assert counters.runs == {}
    assert counters.steps == {"--u": 2}


def test_an_exchanged_bucket_leaves_no_executable_and_no_region() -> None:
    backend = CompileBackend("eager")
    cache = GraphCache(backend, TABLE)

    def steps(bucket: BatchShape) -> Callable[[Inputs], Any]:
        region = cache.region(bucket, "total", total)
        return lambda inputs: region(inputs)

    for bucket in TABLE:
        cache.warm_up(bucket, steps, make_inputs)
    cache.seal()
    cache.exchange(OUTSIDE, B16, steps, make_inputs)
    assert set(cache.table) == set(cache.captured) == {B8, PREFILL, OUTSIDE}
    assert {shape for shape, _ in backend.keys} == {B8, PREFILL, OUTSIDE}
    assert (cache.counters.captures, cache.counters.late_captures) == (4, 0)
    with pytest.raises(ValueError, match="expected a new bucket for one of the table"):
        cache.exchange(B8, PREFILL, steps, make_inputs)

    def fails(inputs: Inputs) -> None:
        raise MemoryError

    def failing(bucket: BatchShape) -> Callable[[Inputs], Any]:
        cache.region(bucket, "total", total)
        return fails

    with pytest.raises(MemoryError):
        cache.exchange(B16, B8, failing, make_inputs)
    assert set(cache.table) == set(cache.captured) == {B8, PREFILL, OUTSIDE}
    assert {shape for shape, _ in backend.keys} == {B8, PREFILL, OUTSIDE}


def test_regions_of_buckets_go_to_the_backend_and_those_of_eager_runs_do_not() -> None:
    cache, backend = make_cache(MissPolicy.EAGER)
    assert cache.region(B8, "layer", abs)(-3) == ("region", 3)
    assert cache.region(OUTSIDE, "layer", abs) is abs
    assert backend.regions == [(B8, "layer")]


@pytest.mark.parametrize("policy", [MissPolicy.ERROR, MissPolicy.CAPTURE])
def test_running_a_shape_that_was_not_resolved_is_refused(policy: MissPolicy) -> None:
    cache, _ = make_cache(policy)
    with pytest.raises(GraphMissError, match="no bucket holds"):
        cache.run(OUTSIDE, total, make_inputs(OUTSIDE))


def test_warm_up_captures_a_bucket_once_and_counts_no_run() -> None:
    cache, backend = make_cache()
    for is_new in (True, False):
        assert [cache.warm_up(bucket, lambda _: total, make_inputs) for bucket in TABLE] == [is_new] * 3
    assert backend.captured == list(TABLE)
    counters = cache.counters
    assert (counters.captures, counters.hits, counters.late_captures) == (3, 0, 0)
    assert counters.runs == {}


def test_warm_up_of_a_shape_outside_the_table_is_refused() -> None:
    cache, backend = make_cache()
    with pytest.raises(ValueError, match="expected a bucket of the table to warm up, got --u/q20"):
        cache.warm_up(OUTSIDE, lambda _: total, make_inputs)
    assert backend.captured == []


def test_a_planned_bucket_captured_after_sealing_counts_as_late() -> None:
    cache, _ = make_cache(MissPolicy.CAPTURE)
    for bucket in (B16, PREFILL):
        cache.warm_up(bucket, lambda _: total, make_inputs)
    cache.seal()
    for shape in (B8, OUTSIDE, B8):
        bucket = cache.resolve(shape)
        cache.run(bucket, total, make_inputs(bucket))
    assert (cache.counters.captures, cache.counters.late_captures) == (4, 1)


def test_a_step_that_fails_while_it_is_captured_leaves_the_bucket_uncaptured() -> None:
    cache, backend = make_cache()
    with pytest.raises(KeyError):
        cache.run(B8, total, {})
    assert cache.counters.captures == 0
    assert cache.counters.runs == {}
    cache.run(B8, total, make_inputs(B8))
    assert backend.captured == [B8, B8]
    assert cache.counters.captures == 1


def test_a_snapshot_of_the_counters_does_not_follow_later_steps() -> None:
    cache, _ = make_cache()
    cache.run(B8, total, make_inputs(B8))
    before = cache.counters
    cache.run(B8, total, make_inputs(B8))
    assert before.runs == {B8: 1}
    assert cache.counters.runs == {B8: 2}


def test_a_captured_step_of_the_eager_backend_returns_what_the_step_returns() -> None:
    cache = GraphCache(EagerBackend(), TABLE)
    assert cache.run(B8, total, make_inputs(B8)) == 28


class CacheMachine(RuleBasedStateMachine):
    """Counters add up whatever mixture of hits and misses arrives, under the capture policy."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.backend = make_cache(MissPolicy.CAPTURE)
        self.num_steps = 0

    @rule(rows=st.integers(1, 30), blocks=st.integers(0, 30))
    def decode(self, rows: int, blocks: int) -> None:
        shape = BatchShape.parse(f"--u/q{rows}/s0/u{blocks}/l{rows}")
        bucket = self.cache.resolve(shape)
        assert bucket.holds(shape)
        self.cache.run(bucket, total, make_inputs(bucket))
        self.num_steps += 1

    @rule()
    def warm(self) -> None:
        for bucket in self.cache.table:
            self.cache.warm_up(bucket, lambda _: total, make_inputs)
        assert set(self.backend.captured) == set(self.cache.table)

    @rule()
    def seal(self) -> None:
        self.cache.seal()

    @invariant()
    def counters_add_up(self) -> None:
        counters = self.cache.counters
        assert counters.hits + counters.misses == self.num_steps
        assert sum(counters.runs.values()) + counters.eager_runs == self.num_steps
        assert sum(counters.steps.values()) == self.num_steps
        assert counters.captures == len(self.backend.captured) == len(set(self.backend.captured))
        assert len(self.cache.table) == len(TABLE) + counters.misses
        assert set(counters.runs) <= set(self.backend.captured) <= set(self.cache.table)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


@given(st.lists(st.sampled_from([B8, B16, PREFILL]), max_size=20))
def test_each_bucket_is_captured_once_in_order_of_first_use(buckets: list[BatchShape]) -> None:
    cache, backend = make_cache()
    for bucket in buckets:
        cache.run(cache.resolve(bucket), total, make_inputs(bucket))
    assert backend.captured == list(dict.fromkeys(buckets))


def test_buckets_beyond_the_limit_are_padded_to_and_run_as_they_are_written() -> None:
    backend = RecordingBackend()
    cache = GraphCache(backend, TABLE, max_captured_tokens=16)
    assert (cache.captures(B16), cache.captures(PREFILL), cache.captures(OUTSIDE)) == (True, False, False)
    assert cache.resolve(BatchShape.parse("c--/q40/s0/u0/l1")) == PREFILL
    assert cache.region(PREFILL, "layer", max) is max
    for _ in range(3):
        assert cache.run(PREFILL, total, make_inputs(PREFILL)) == sum(range(64))
    assert cache.run(B16, total, make_inputs(B16)) == ("captured", sum(range(16)))
    seen = cache.counters
    assert (seen.captures, seen.bypasses, seen.eager_runs, seen.misses) == (1, 3, 0, 0)
    assert seen.runs == {PREFILL: 3, B16: 1}
    assert backend.captured == [B16]


def test_warm_up_runs_a_bucket_beyond_the_limit_once_and_a_sealed_cache_has_nothing_late() -> None:
    backend = RecordingBackend()
    cache = GraphCache(backend, TABLE, max_captured_tokens=8)
    ran: list[BatchShape] = []

    def make(bucket: BatchShape) -> Inputs:
        ran.append(bucket)
        return make_inputs(bucket)

    for is_new in (True, False):
        assert [cache.warm_up(bucket, lambda bucket: total, make) for bucket in TABLE] == [is_new] * 3
    assert sorted(ran) == sorted(TABLE)
    assert backend.captured == [B8]
    cache.seal()
    cache.run(PREFILL, total, make_inputs(PREFILL))
    assert (cache.counters.captures, cache.counters.late_captures, cache.counters.bypasses) == (1, 0, 1)
    assert not cache.captured_late


def test_captures_after_the_seal_are_listed_with_those_that_misses_add() -> None:
    cache, _ = make_cache(MissPolicy.CAPTURE)
    cache.seal()
    for shape in (B8, OUTSIDE, OUTSIDE):
        bucket = cache.resolve(shape)
        cache.run(bucket, total, make_inputs(bucket))
    assert cache.captured_late == {B8: 1, OUTSIDE: 1}
    assert cache.counters.late_captures == 1


def test_another_table_keeps_backend_and_limit() -> None:
    cache = GraphCache(EagerBackend(), TABLE, max_captured_tokens=8)
    other = cache.with_table(BucketTable((B8,)), MissPolicy.EAGER)
    assert (other.backend, other.policy, len(other.table)) == (cache.backend, MissPolicy.EAGER, 1)
    assert other.max_captured_tokens == 8


def test_a_limit_that_captures_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_captured_tokens >= 1 or None, got 0"):
        GraphCache(EagerBackend(), TABLE, max_captured_tokens=0)


def test_an_uncounted_run_is_the_run_of_a_step_without_its_counts() -> None:
    cache, _ = make_cache()
    assert cache.run_uncounted(B8, total, make_inputs(B8)) == ("captured", sum(range(8)))
    assert cache.run_uncounted(B8, total, make_inputs(B8)) == ("captured", sum(range(8)))
    assert (cache.counters.captures, dict(cache.counters.runs), dict(cache.counters.steps)) == (1, {}, {})


@pytest.mark.parametrize("backend", [ReplayBackend(), CompileBackend()], ids=lambda backend: backend.name)
def test_warm_up_leaves_nothing_of_a_replayed_step_to_be_written_later(
    backend: ReplayBackend | CompileBackend,
) -> None:
    cache, num_calls = GraphCache(backend, TABLE, MissPolicy.ERROR), 0

    def doubled(inputs: Inputs) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return inputs["token_ids"] * 2

    for bucket in cache.table:
        cache.warm_up(bucket, lambda bucket: doubled, make_inputs)
    assert num_calls == backend.num_first_runs * len(TABLE)
    bucket = cache.resolve(BatchShape.parse("--u/q5/s0/u2/l5"))
    assert cache.run(bucket, doubled, make_inputs(bucket)).tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert num_calls == backend.num_first_runs * len(TABLE)
