"""Bucket tables for recorded traffic, or without a recording for the stated workload."""

from __future__ import annotations

from dataclasses import replace

from graphs import BucketTable, CostFunction, StepLimits
from graphs.planner import (
    ASSUMED,
    FINE,
    GraphBudget,
    Resolution,
    Traffic,
    mean_padding,
    or_default,
    plan_table,
)
from graphs.promise import Promise
from hpu_duo.simulate.users import prior


def plan_buckets(
    limits: StepLimits,
    budget: GraphBudget | int,
    cost: CostFunction | None = None,
    traffic: Traffic | None = None,
    *,
    resolution: Resolution = FINE,
) -> BucketTable:
    """Choose the buckets that pad least, within a budget, and hold every reachable shape.

    Args:
        budget: an int is a number of graphs.
        cost: default ``StepCost(block_size=limits.block_size)``.
        traffic: recorded shapes and how often each occurs. None plans for ``prior(limits)``, blurred by
            ``ASSUMED``, and returns the default table (``BucketTable.exponential``) if that costs less on
            other users of the same kind.
        resolution: finer takes longer and pads less.

    Returns:
        The table, which promises the padding of the recording, or of those other users.

    Raises:
        ValueError: see ``graphs.planner.plan_table``.
    """
    budget = GraphBudget.of(budget)
    if traffic is not None:
        return _promising(plan_table(limits, budget, traffic, cost, resolution=resolution), traffic)
    budget.check_holds(limits.largest)  # refused before anybody is served
    planned = plan_table(limits, budget, prior(limits), cost, blur=ASSUMED, resolution=resolution)
    others = prior(limits, seed=1)
    return _promising(or_default(planned, budget, limits, others), others)


def _promising(table: BucketTable, traffic: Traffic) -> BucketTable:
    """The table with what it pads some traffic by."""
    return replace(table, promise=Promise.by(table.cost, mean_padding(table, traffic)))
