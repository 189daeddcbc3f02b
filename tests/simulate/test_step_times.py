"""Measured times of steps: medians, the fit for other shapes, files, and the measuring itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import BatchShape, StepLimits
from hpu_duo.lab.simulate.measuring import Batch, batches, measure_steps
from hpu_duo.lab.simulate.server import SimulatedServer
from hpu_duo.lab.simulate.step_times import MeasuredShape, StepTimes
from tests.engine.tiny import Tiny
from tests.tiers import further

LIMITS = StepLimits(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=256,
    block_size=16,
    num_blocks=128,
    max_chunk_rows=1,
    decode_len=1,
)

shapes = st.one_of(
    st.builds(
        lambda rows, blocks: BatchShape.parse(f"--u/q{rows}/s0/u{blocks}/l{rows}"),
        st.integers(1, 8),
        st.integers(0, 128),
    ),
    st.builds(
        lambda tokens, blocks: BatchShape.parse(f"cs-/q{tokens}/s{blocks}/u0/l1"),
        st.integers(2, 64),
        st.integers(0, 60),
    ),
)


def seconds_of(shape: BatchShape) -> float:
    """A machine whose steps take what they read and multiply."""
    prompts = 1e-3 + 2e-6 * shape.query_len**2 if shape.phase.causal else 0.0
    pairs = 1e-7 * shape.query_len * shape.num_shared_blocks
    return 2e-3 + prompts + 1e-4 * shape.query_len + 1e-5 * shape.num_unique_blocks + pairs


def drawn(num: int, seed: int = 0) -> list[BatchShape]:
    rng = np.random.default_rng(seed)
    decodes = [f"--u/q{rows}/s0/u{rng.integers(0, 128)}/l{rows}" for rows in rng.integers(1, 9, num)]
    chunks = [f"cs-/q{tokens}/s{rng.integers(0, 60)}/u0/l1" for tokens in rng.integers(2, 65, num)]
    return [BatchShape.parse(text) for text in decodes + chunks]


TIMES = StepTimes.of([(shape, seconds_of(shape)) for shape in drawn(60)], LIMITS)


@given(shape=shapes)
@settings(deadline=None)
def test_the_fit_finds_costs_that_are_a_sum_again(shape: BatchShape) -> None:
    assert TIMES.fitted(shape) == pytest.approx(seconds_of(shape), rel=0.02)


@given(one=shapes, other=shapes, seed=st.integers(0, 50))
@settings(deadline=None, max_examples=20)
def test_a_shape_that_holds_another_never_takes_less_by_the_fit(
    one: BatchShape, other: BatchShape, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    noisy = [(shape, seconds_of(shape) * float(np.exp(rng.normal(0, 0.7)))) for shape in drawn(6, seed)]
    times = StepTimes.of(noisy, LIMITS)
    assert times.fitted(one) > 0
    assert times.fitted(one | other) >= times.fitted(one) * (1 - 1e-9)


def test_a_shape_measured_often_takes_its_median_and_others_the_fit() -> None:
    often, once = BatchShape.parse("--u/q1/s0/u3/l1"), BatchShape.parse("--u/q2/s0/u3/l2")
    times = StepTimes.of([(often, 5.0), (often, 1.0), (often, 9.0), (once, 70.0)], LIMITS)
    assert times(often) == 5.0
    assert times(once) == times.fitted(once)
    assert times.measured[often] == MeasuredShape(5.0, 3)


def test_a_file_gives_the_same_times_again(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    buckets = (BatchShape.parse("csu/q64/s128/u128/l8"),)
    times = StepTimes.of(
        [(shape, seconds_of(shape)) for shape in drawn(5)], LIMITS, buckets, {"device": "cpu"}
    )
    times.write(path)
    assert StepTimes.read(path) == times
    assert StepTimes.read(path).table is not None
    assert TIMES.table is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": "something else"},
        {"limits": {"max_num_seqs": 1}},
        {"steps": {}},
        {"steps": {"nonsense": {"median_s": 1.0, "num_steps": 1}}},
        {"steps": {"--u/q1/s0/u3/l1": {"median_s": -1.0, "num_steps": 1}}},
        {"steps": {"--u/q1/s0/u3/l1": {"median_s": 1.0}}},
        {"steps": 3},
    ],
)
def test_other_files_are_refused_with_their_name(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "steps.json"
    TIMES.write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=r"expected step times in .*steps\.json"):
        StepTimes.read(path)


@given(max_num_seqs=st.integers(1, 40), max_len=st.integers(1, 3000), held=st.none() | st.integers(13, 4000))
def test_batches_reach_every_limit_and_fit(max_num_seqs: int, max_len: int, held: int | None) -> None:
    found = batches(max_num_seqs, max_len, held)
    assert len(set(found)) == len(found)
    assert all(1 <= each.num_requests <= max_num_seqs for each in found)
    assert all(1 <= each.num_prompt_tokens <= max_len for each in found)
    if held is None:
        assert Batch(max_num_seqs, max_len) in found
        assert Batch(1, min(16, max_len)) in found


class Clock:
    """Tells a second more each time it is asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("graphs", [*further("eager"), "replay"])
def test_an_engine_is_measured_in_every_phase_and_left_as_it_was(tiny: Tiny, graphs: str) -> None:
    engine = tiny.load(num_blocks=64, graphs=graphs).engine
    # By this clock a step takes a second, and asking for the time does so too.
    times = measure_steps(engine, max_seconds=1000.0, clock=Clock(), description={"device": "cpu"})
    assert not engine.has_unfinished
    assert engine.step_recorder is None
    assert engine.scheduler.allocations.blocks.num_used == 0
    assert {one.median_s for one in times.measured.values()} == {1.0}
    assert times.limits == engine.scheduler.limits
    assert (times.table is None) == (graphs == "eager")
    if graphs == "eager":
        assert {"c--", "cs-", "csu", "--u"} <= {str(shape.phase) for shape in times.measured}
    else:
        assert times.measured.keys() <= set(times.buckets)
    server = SimulatedServer.measured(times)
    assert (server.limits, server.table is None) == (times.limits, graphs == "eager")


def test_measuring_ends_in_time_and_busy_engines_are_refused(tiny: Tiny) -> None:
    engine = tiny.load(num_blocks=64).engine
    clock = Clock()
    assert measure_steps(engine, max_seconds=1.0, clock=clock).measured
    assert clock.now < 200  # one batch of at most 4 requests
    assert not engine.has_unfinished
    engine.add_request([1, 2, 3])
    with pytest.raises(ValueError, match="expected an engine without requests"):
        measure_steps(engine)
