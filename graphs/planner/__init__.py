"""Which buckets a table should have: chosen for a budget, and compared with what others choose."""

from graphs.planner.evaluation import PaddingReport, evaluate
from graphs.planner.plan import GraphBudget, plan_table
from graphs.planner.prior import prior
from graphs.planner.search import Resolution
from graphs.planner.strategies import Grid, exponential, linear, padding_aware, upstream_unified
from graphs.planner.traffic import Blur, Traffic, smoothed

__all__ = [
    "Blur",
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
