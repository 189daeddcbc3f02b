"""Costs of a model on Gaudi 2 and Gaudi 3: memory, concurrency, predicted speed.

Made from public sources only; see docs/cost-model.md. No Gaudi was measured by this project.
"""

from hpu_duo.cost.capacity import (
    SECONDS_PER_GRAPH,
    Capacity,
    CapacityPoint,
    WarmUp,
    capacity,
    step_cost,
    step_limits,
)
from hpu_duo.cost.deployment import Deployment, Serving
from hpu_duo.cost.fit import fit, leave_one_model_out, median_error, relative_error
from hpu_duo.cost.fitted import FITTED
from hpu_duo.cost.hardware import GAUDI2, GAUDI3, HARDWARE_NAMES, Format, Hardware, find_hardware
from hpu_duo.cost.model import AttentionSize, Experts, ModelSize
from hpu_duo.cost.published import PublishedRow, published_rows, published_sources, split_rows
from hpu_duo.cost.roofline import Efficiency, Seconds, predict_seconds, roof_seconds
from hpu_duo.cost.work import Formats, Step, Work, step_work

__all__ = [
    "FITTED",
    "GAUDI2",
    "GAUDI3",
    "HARDWARE_NAMES",
    "SECONDS_PER_GRAPH",
    "AttentionSize",
    "Capacity",
    "CapacityPoint",
    "Deployment",
    "Efficiency",
    "Experts",
    "Format",
    "Formats",
    "Hardware",
    "ModelSize",
    "PublishedRow",
    "Seconds",
    "Serving",
    "Step",
    "WarmUp",
    "Work",
    "capacity",
    "find_hardware",
    "fit",
    "leave_one_model_out",
    "median_error",
    "predict_seconds",
    "published_rows",
    "published_sources",
    "relative_error",
    "roof_seconds",
    "split_rows",
    "step_cost",
    "step_limits",
    "step_work",
]
