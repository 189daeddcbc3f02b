"""The planner of bucket tables for a budget and for traffic, and a comparison with other strategies."""

from graphs.planner.evaluation import Blur, PaddingReport, Traffic, evaluate, mean_padding, smoothed
from graphs.planner.plan import ASSUMED, FINE, RECORDED, GraphBudget, or_default, plan_table
from graphs.planner.search import Resolution
from graphs.planner.strategies import Grid, exponential, linear, padding_aware, upstream_unified

__all__ = [
    "ASSUMED",
    "FINE",
    "RECORDED",
    "Blur",
    "GraphBudget",
    "Grid",
    "PaddingReport",
    "Resolution",
    "Traffic",
    "evaluate",
    "exponential",
    "linear",
    "mean_padding",
    "or_default",
    "padding_aware",
    "plan_table",
    "smoothed",
    "upstream_unified",
]
