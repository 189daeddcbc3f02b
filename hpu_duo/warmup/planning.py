"""A table for an engine, chosen such that its warm-up fits a budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graphs import BucketTable
from graphs.planner import GraphBudget
from graphs.recording import read_shapes
from hpu_duo.engine.engine import Engine
from hpu_duo.simulate import plan_buckets
from hpu_duo.startup.tables import default_table
from hpu_duo.warmup.estimate import GraphCosts, WarmUpBudget

_GIB = 1 << 30
_LEAST_S = 1e-3


def plan_within(
    engine: Engine,
    num_graphs: int,
    budget: WarmUpBudget | None = None,
    recordings: Sequence[str | Path] = (),
) -> BucketTable:
    """Choose the buckets that pad least for the limits of an engine, by the cost of a step of its model.

    Args:
        num_graphs: most buckets.
        budget: bounds on their warm-up, by the estimates of ``GraphCosts``.
        recordings: files of ``record_shapes`` to plan for; without any, ``hpu_duo.simulate.prior`` is used.

    Raises:
        ValueError: the budget does not hold the smallest table, a recording cannot be read, or it has shapes
            that the engine cannot produce.
    """
    budget = budget or WarmUpBudget()
    runner, limits, costs = engine.runner, engine.scheduler.limits, GraphCosts.of(engine)
    text_config = runner.model.model.config.get_text_config()
    longest_s = costs.seconds(limits.largest)[1]
    within = GraphBudget(
        num_graphs if budget.max_graphs is None else min(num_graphs, budget.max_graphs),
        seconds=budget.max_seconds,
        seconds_per_graph=None if budget.max_seconds is None else max(_LEAST_S, longest_s),
        memory_bytes=_for_graphs(budget, costs.sizes.transient_bytes(limits.largest)),
        bytes_of=None if budget.max_gib is None else costs.kept_bytes,
    )
    traffic = read_shapes(*recordings) if recordings else None
    return plan_buckets(limits, within, default_table(limits, runner.model.specs, text_config).cost, traffic)


def _for_graphs(budget: WarmUpBudget, transient_bytes: int) -> float | None:
    if budget.max_gib is None:
        return None
    left = budget.max_gib * _GIB - transient_bytes
    if left <= 0:
        raise ValueError(
            f"a budget of {budget.max_gib:g} GiB does not hold the smallest table: the largest step takes "
            f"{transient_bytes / _GIB:.3f} GiB while it runs"
        )
    return left
