"""Shapes that are carried over from the step before are those that the engine lays out."""

from typing import Any

import pytest

from graphs import BatchShape, StepLimits
from hpu_duo.engine.batch import StepBatch
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.lab.simulate.sessions import SessionArrivals
from hpu_duo.lab.traces import make_workload
from hpu_duo.planning.simulation import SimulatedEngine, Simulation, StepShapes
from hpu_duo.scheduling import make_policy

LIMITS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "block_size": 16,
    "num_blocks": 60,
    "max_chunk_rows": 2,
    "decode_len": 1,
}
PREFIXES: dict[str, Any] = {
    "caches_prefixes": True,
    "num_snapshots": 4,
    "max_block_moves": 4,
    "step_tokens": 16,
}


@pytest.mark.parametrize("others", [{}, PREFIXES, {**PREFIXES, "uses_rows": False}], ids=str)
@pytest.mark.parametrize(
    "workload",
    [
        "poisson:prompts=60~1,outputs=80~1",
        "chats:per_s=9,turns=2,pause_s=1,messages=20~0.3,outputs=40~0.3,system_len=48",
    ],
)
def test_shapes_are_those_of_the_steps_laid_out(
    workload: str, others: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = StepLimits(**LIMITS, **others)
    found: list[tuple[BatchShape, BatchShape]] = []
    of = StepShapes.of

    def compared(shapes: StepShapes, plan: StepPlan) -> BatchShape:
        found.append((of(shapes, plan), StepBatch.of(plan, limits.block_size).shape))
        return found[-1][0]

    monkeypatch.setattr(StepShapes, "of", compared)
    sessions = make_workload(workload).sessions(60)
    engine = SimulatedEngine(Scheduler(limits, policy=make_policy("srtf")), lambda bucket: 0.05)
    simulation = Simulation(engine, SessionArrivals(sessions, limits.max_model_len))
    num_preempted = sum(len(step.plan.preempted) for step in simulation.steps())
    assert found
    assert all(own == laid_out for own, laid_out in found)
    assert num_preempted, "blocks ran out on the way"
