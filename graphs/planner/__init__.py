"""The planner of bucket tables for a budget and for traffic, and a comparison with other strategies."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphs.planner.evaluation import Blur, Traffic, mean_padding, smoothed
from graphs.planner.plan import ASSUMED, FINE, RECORDED, GraphBudget, or_default, plan_table
from graphs.planner.search import Resolution

if TYPE_CHECKING:
    from graphs.planner.comparison import (
        Grid,
        PaddingReport,
        evaluate,
        exponential,
        linear,
        padding_aware,
        upstream_unified,
    )

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


def __getattr__(name: str) -> Any:
    # What compares tables is not needed where they are served.
    if name in __all__:
        return getattr(import_module("graphs.planner.comparison"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
