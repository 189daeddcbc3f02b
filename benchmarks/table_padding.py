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
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.table_traffic import TRAFFICS
from graphs import BatchShape, BucketTable, CostFunction, StepLimits
from graphs.planner.cells import Cells, cheapest
from graphs.planner.replan import replan
from graphs.prices import QUERY, Floats, Levels, price, to_levels
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.lab.simulate.sessions import SessionArrivals
from hpu_duo.lab.traces.workloads import make_workload
from hpu_duo.planning import (
    HARDWARE_NAMES,
    Deployment,
    Serving,
    WarmUp,
    find_hardware,
    step_cost,
)
from hpu_duo.planning.read_model import read_model
from hpu_duo.planning.roofline import StepSeconds
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
NUM_EXCHANGED = 16
"""Captures of a small budget of ``--replan``."""
WORST = 0.6
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
    cost = step_cost(deployment)
    padding = Padding(replace(cost, is_fused=True))
    began = time.process_time()
    cold = plan_buckets(LIMITS, num_graphs, cost)
    yield f"Planned without a recording in {time.process_time() - began:.1f} s: {len(cold)} buckets."
    yield ""
    traffics = {traffic.name: partial(traffic.steps, LIMITS) for traffic in TRAFFICS}
    traffics |= {f"`{text}`": partial(held_back, text, cost) for text in HELD_BACK}
    recorded = {name: steps(NUM_RECORDED, RECORDED_SEED) for name, steps in traffics.items()}
    measured = {name: steps(NUM_MEASURED, MEASURED_SEED) for name, steps in traffics.items()}
    names = ("traffic", "no recording: mean", "if fused", "worst", "its own recording: mean", "if fused")
    yield from _header(*names, "worst", "seconds to plan", "least buckets for 60 %")
    for name, steps in measured.items():
        began = time.process_time()
        own = plan_buckets(LIMITS, num_graphs, cost, recorded[name])
        seconds = time.process_time() - began
        least = fewest_buckets(cost, to_levels(recorded[name]), WORST)
        cells = padding.of(cold, steps), padding.of(own, steps)
        yield f"| {name} | {' | '.join(cells)} | {seconds:.1f} | {least} |"
    yield ""
    every = fewest_buckets(cost, Cells.within(LIMITS, cost).highest, WORST)
    yield f"For every reachable step it takes at least {every} buckets."
    yield ""
    yield from _header(
        *("traffic", "before: mean", "worst", f"after {NUM_EXCHANGED} captures: mean", "worst"),
        *("predicted seconds", "captures", "after all: mean", "worst", "predicted seconds"),
    )
    for name, steps in measured.items():
        yield _replanned(name, cold, recorded[name], steps, padding, deployment)


def _header(first: str, *others: str) -> Iterator[str]:
    yield f"| {' | '.join((first, *others))} |"
    yield f"| --- |{' ---: |' * len(others)}"


def _replanned(
    name: str, table: BucketTable, recorded: Steps, steps: Steps, padding: Padding, deployment: Deployment
) -> str:
    """A row: the table after exchanges that a recording leads to, and the seconds of their captures."""
    exchanges = replan(table, LIMITS, recorded).exchanges
    cells = [padding.mean_and_worst(table, steps)]
    for num in (min(NUM_EXCHANGED, len(exchanges)), len(exchanges)):
        some = exchanges[:num]
        kept = set(table)
        for each in some:
            kept = (kept | {each.added}) - {each.dropped}
        after = replace(table, buckets=tuple(kept))
        captured = [deployment.engine_work.compiled(each.added) for each in some]
        warm_up = WarmUp.of(captured, deployment.num_layer_kinds) if captured else None
        seconds = "0" if warm_up is None else f"{warm_up.low_s:.0f} to {warm_up.high_s:.0f}"
        cells.append(f"{padding.mean_and_worst(after, steps)} | {seconds}")
    return f"| {name} | {cells[0]} | {cells[1]} | {len(exchanges)} | {cells[2]} |"


def fewest_buckets(cost: StepSeconds, shapes: Levels, worst: float) -> int:
    """A lower bound on the buckets of a table that pads none of some steps by more than ``worst``.

    It is the number of shapes of which no two can share a bucket: it would hold both, and so be too dear for
    the cheaper one.

    Args:
        shapes: int64 ``[n, 7]``.
    """
    own = price(cost, shapes)
    apart: list[int] = []
    for number in np.argsort(own, kind="stable").tolist():
        joined = _least(cost, np.maximum(shapes[apart], shapes[number])) if apart else np.zeros(0)
        if (joined > (1 + worst) * np.minimum(own[apart], own[number])).all():
            apart.append(number)
    return len(apart)


def _least(cost: StepSeconds, levels: Levels) -> Floats:
    """The least cost of a bucket that holds a shape: sizes only add to it, a further part may not."""
    found = np.full(len(levels), np.inf)
    for parts in product((0, 1), repeat=QUERY):
        bucket = levels.copy()
        bucket[:, :QUERY] |= np.array(parts, dtype=np.int64)
        found = np.minimum(found, price(cost, bucket))
    return found


class Padding:
    """Padding in predicted seconds."""

    def __init__(self, fused: StepSeconds) -> None:
        self._fused = fused

    def of(self, table: BucketTable, steps: Steps) -> str:
        """The mean of steps in a table, the same if fused, and that of the worst step, as three cells."""
        mean, worst = self._measured(table, steps, table.cost)
        return f"{mean:.1%} | {self._measured(table, steps, self._fused)[0]:.1%} | {worst:.0%}"

    def mean_and_worst(self, table: BucketTable, steps: Steps) -> str:
        """The mean and that of the worst step, as two cells."""
        mean, worst = self._measured(table, steps, table.cost)
        return f"{mean:.1%} | {worst:.0%}"

    def _measured(self, table: BucketTable, steps: Steps, cost: CostFunction) -> tuple[float, float]:
        shapes, buckets = to_levels(steps), to_levels(table.buckets)
        found = cheapest(buckets, price(table.cost, buckets), shapes)
        assert (found >= 0).all(), "a planned table holds every step"
        counts = np.array(list(steps.values()), dtype=np.float64)
        own, spent = price(cost, shapes), price(cost, buckets)[found]
        return float(counts @ spent / (counts @ own) - 1), float((spent / own).max() - 1)


def held_back(text: str, cost: StepSeconds, num_steps: int, seed: int) -> dict[BatchShape, int]:
    """Steps of a generator of the load tests, which take as long as predicted."""
    sessions = make_workload(text, seed).sessions(6000)
    engine = SimulatedEngine(Scheduler(LIMITS), cost)
    arrivals = SessionArrivals(sessions, LIMITS.max_model_len, seed)
    counts: Counter[BatchShape] = Counter()
    for number, step in enumerate(Simulation(engine, arrivals).steps()):
        if number == num_steps:
            break
        counts[step.shape] += 1
    return counts


if __name__ == "__main__":
    main()
