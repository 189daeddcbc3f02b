"""Padding of planned tables on traffic that they were planned for, and on traffic that they were not.

    python -m benchmarks.table_padding --model DIR [--graphs 64] [--hardware gaudi3]

``DIR`` has a config.json; the results page is for Llama-3.1-8B. Takes some minutes on one core. Padding is
the predicted seconds of the padded steps over those of the exact ones, less 1: with the operators that
``hpu-duo audit`` counts, and as if they were fused as in the software of the published figures.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from benchmarks.table_traffic import TRAFFICS
from graphs import BatchShape, BucketTable, Miss, StepCost, StepLimits
from graphs.planner.cells import Cells, Floats, price
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.lab.simulate.sessions import SessionArrivals
from hpu_duo.lab.traces.workloads import make_workload
from hpu_duo.planning import (
    FITTED,
    HARDWARE_NAMES,
    Deployment,
    Serving,
    find_hardware,
    predict_seconds,
    step_cost,
)
from hpu_duo.planning.read_model import read_model
from hpu_duo.planning.simulation import SimulatedEngine, Simulation, plan_buckets
from kernels_ref import PLAIN

LIMITS = StepLimits(
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    max_model_len=131_072,
    block_size=128,
    num_blocks=4000,
    decode_len=1,
    max_chunk_rows=1,
)
HELD_BACK = (
    *("chats:per_s=1", "agents:per_s=0.05", "documents:per_s=0.2"),
    *("bursts:per_s=3", "poisson:per_s=6", "flood"),
)
"""Generators of the load tests; nothing is planned from a recording of them."""
NUM_RECORDED, NUM_MEASURED = 8000, 4000
RECORDED_SEED, MEASURED_SEED = 1, 2
Steps = Mapping[BatchShape, int]


def main() -> None:
    """Plan, measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="directory with a config.json")
    parser.add_argument("--graphs", type=int, default=64, help="buckets of a table")
    parser.add_argument("--hardware", default="gaudi3", choices=HARDWARE_NAMES)
    options = parser.parse_args()
    for line in report(options.model, options.graphs, options.hardware):
        print(line, flush=True)


def report(model: Path, num_graphs: int, hardware: str) -> Iterator[str]:
    """Lines of the page."""
    serving = Serving(
        find_hardware(hardware),
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
    )
    deployment = Deployment(read_model(model), serving, 0.0, PLAIN, LIMITS.max_model_len)
    cost, padding = step_cost(deployment), Padding(deployment)
    began = time.process_time()
    cold = plan_buckets(LIMITS, num_graphs, cost)
    yield f"Planned without a recording in {time.process_time() - began:.1f} s: {len(cold)} buckets."
    yield ""
    yield f"A worst reachable step of 60 % takes at least {fewest_buckets(cost, 0.6)} buckets."
    yield ""
    yield ("| traffic | no recording: mean | if fused | worst | its own recording: mean | if fused | worst |")
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for traffic in TRAFFICS:
        own = plan_buckets(LIMITS, num_graphs, cost, traffic.steps(LIMITS, NUM_RECORDED, RECORDED_SEED))
        steps = traffic.steps(LIMITS, NUM_MEASURED, MEASURED_SEED)
        yield f"| {traffic.name} | {padding.of(cold, steps)} | {padding.of(own, steps)} |"
    for text in HELD_BACK:
        yield f"| `{text}` | {padding.of(cold, held_back(text, cost))} | | | |"


def fewest_buckets(cost: StepCost, worst: float) -> int:
    """A lower bound on the buckets of a table that pads no reachable step by more than ``worst``.

    It is the number of shapes of which no two can share a bucket: it would hold both, and so be too dear for
    the cheaper one.
    """
    shapes = Cells.within(LIMITS, cost).highest
    own = price(cost, shapes)
    apart: list[int] = []
    for number in np.argsort(own, kind="stable").tolist():
        joined = price(cost, np.maximum(shapes[apart], shapes[number])) if apart else np.zeros(0)
        if (joined > (1 + worst) * np.minimum(own[apart], own[number])).all():
            apart.append(number)
    return len(apart)


class Padding:
    """Padding in predicted seconds of one deployment."""

    def __init__(self, deployment: Deployment) -> None:
        self._work, self._hardware = deployment.engine_work, deployment.serving.hardware
        self._seconds = lru_cache(maxsize=None)(self._predict)

    def of(self, table: BucketTable, steps: Steps) -> str:
        """The mean of steps in a table, the same if fused, and that of the worst step, as three cells."""
        exact, padded, worst = np.zeros(2), np.zeros(2), 0.0
        for shape, count in steps.items():
            bucket = table.fit(shape)
            assert not isinstance(bucket, Miss), "a planned table holds every step"
            own, spent = self._seconds(shape), self._seconds(bucket)
            exact, padded, worst = exact + count * own, padded + count * spent, max(worst, spent[0] / own[0])
        mean, fused = padded / exact - 1
        return f"{mean:.1%} | {fused:.1%} | {worst - 1:.0%}"

    def _predict(self, shape: BatchShape) -> Floats:
        work = self._work.of(shape)
        return np.array(
            [predict_seconds(each, self._hardware, 1, FITTED).total for each in (work, work.fused)]
        )


def held_back(text: str, cost: StepCost) -> Steps:
    """Steps of a generator of the load tests, which take as long as predicted."""
    sessions = make_workload(text, MEASURED_SEED).sessions(3000)
    engine = SimulatedEngine(Scheduler(LIMITS), cost)
    arrivals = SessionArrivals(sessions, LIMITS.max_model_len, MEASURED_SEED)
    counts: Counter[BatchShape] = Counter()
    for number, step in enumerate(Simulation(engine, arrivals).steps()):
        if number == NUM_MEASURED:
            break
        counts[step.shape] += 1
    return counts


if __name__ == "__main__":
    main()
