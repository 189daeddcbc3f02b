"""Costs of a model on Gaudi 2 and Gaudi 3: memory, concurrency, predicted speed.

Made from public sources only; see docs/cost-model.md. No Gaudi was measured by this project.
"""

from hpu_duo.cost.capacity import Capacity, CapacityPoint, capacity, step_cost, step_limits
from hpu_duo.cost.deployment import Deployment, Serving
from hpu_duo.cost.engine_work import EngineWork, busiest_rank
from hpu_duo.cost.fit import (
    fit,
    leave_one_model_out,
    median_error,
    relative_error,
    worst_factor,
    worst_unseen,
)
from hpu_duo.cost.fitted import ERROR_FACTORS, FITTED
from hpu_duo.cost.hardware import GAUDI2, GAUDI3, HARDWARE_NAMES, Format, Hardware, find_hardware
from hpu_duo.cost.kept import KeptByHeads
from hpu_duo.cost.kernel_work import PUBLISHED_LAYER_LAUNCHES, KernelWork
from hpu_duo.cost.kernels import FUSED, PORTABLE, kernels_of
from hpu_duo.cost.model import AttentionSize, Experts, ModelSize
from hpu_duo.cost.prediction import Prediction
from hpu_duo.cost.published import PublishedRow, published_rows, published_sources, split_rows
from hpu_duo.cost.roofline import Efficiency, Seconds, predict_seconds, roof_seconds
from hpu_duo.cost.warm_up import SECONDS_PER_GRAPH, TRACE_S_PER_OPERATOR, WarmUp, graph_scale
from hpu_duo.cost.work import Formats, Step, Work, step_work

__all__ = [
    "ERROR_FACTORS",
    "FITTED",
    "FUSED",
    "GAUDI2",
    "GAUDI3",
    "HARDWARE_NAMES",
    "PORTABLE",
    "PUBLISHED_LAYER_LAUNCHES",
    "SECONDS_PER_GRAPH",
    "TRACE_S_PER_OPERATOR",
    "AttentionSize",
    "Capacity",
    "CapacityPoint",
    "Deployment",
    "Efficiency",
    "EngineWork",
    "Experts",
    "Format",
    "Formats",
    "Hardware",
    "KeptByHeads",
    "KernelWork",
    "ModelSize",
    "Prediction",
    "PublishedRow",
    "Seconds",
    "Serving",
    "Step",
    "WarmUp",
    "Work",
    "busiest_rank",
    "capacity",
    "find_hardware",
    "fit",
    "graph_scale",
    "kernels_of",
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
    "worst_factor",
    "worst_unseen",
]
