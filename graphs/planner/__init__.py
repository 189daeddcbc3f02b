"""Which buckets a table should have: chosen for a budget, and compared with what others choose."""

from graphs.planner.evaluation import PaddingReport, evaluate
from graphs.planner.plan import COARSE, GraphBudget, Resolution, plan_table
from graphs.planner.strategies import Grid, exponential, linear, padding_aware, upstream_unified
from graphs.planner.traffic import Traffic, prior, smoothed

__all__ = [
    "COARSE",
    "GraphBudget",
    "Grid",
    "PaddingReport",
    "Resolution",
    "Traffic",
    "evaluate",
    "exponential",
    "linear",
    "padding_aware",
    "plan_table",
    "prior",
    "smoothed",
    "upstream_unified",
]
