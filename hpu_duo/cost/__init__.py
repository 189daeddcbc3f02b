"""Costs of a model on Gaudi 2 and Gaudi 3: memory, concurrency, predicted speed.

Made from public sources only; see docs/cost-model.md. No Gaudi was measured by this project.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpu_duo.cost.capacities import Capacity, CapacityPoint, capacity, step_cost, step_limits
    from hpu_duo.cost.deployment import Deployment, Serving
    from hpu_duo.cost.engine_work import EngineWork, busiest_rank
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
    "graph_scale",
    "kernels_of",
    "predict_seconds",
    "published_rows",
    "published_sources",
    "roof_seconds",
    "split_rows",
    "step_cost",
    "step_limits",
    "step_work",
]

_HOMES = {
    "Capacity": "hpu_duo.cost.capacities",
    "CapacityPoint": "hpu_duo.cost.capacities",
    "capacity": "hpu_duo.cost.capacities",
    "step_cost": "hpu_duo.cost.capacities",
    "step_limits": "hpu_duo.cost.capacities",
    "Deployment": "hpu_duo.cost.deployment",
    "Serving": "hpu_duo.cost.deployment",
    "EngineWork": "hpu_duo.cost.engine_work",
    "busiest_rank": "hpu_duo.cost.engine_work",
    "ERROR_FACTORS": "hpu_duo.cost.fitted",
    "FITTED": "hpu_duo.cost.fitted",
    "GAUDI2": "hpu_duo.cost.hardware",
    "GAUDI3": "hpu_duo.cost.hardware",
    "HARDWARE_NAMES": "hpu_duo.cost.hardware",
    "Format": "hpu_duo.cost.hardware",
    "Hardware": "hpu_duo.cost.hardware",
    "find_hardware": "hpu_duo.cost.hardware",
    "KeptByHeads": "hpu_duo.cost.kept",
    "PUBLISHED_LAYER_LAUNCHES": "hpu_duo.cost.kernel_work",
    "KernelWork": "hpu_duo.cost.kernel_work",
    "FUSED": "hpu_duo.cost.kernels",
    "PORTABLE": "hpu_duo.cost.kernels",
    "kernels_of": "hpu_duo.cost.kernels",
    "AttentionSize": "hpu_duo.cost.model",
    "Experts": "hpu_duo.cost.model",
    "ModelSize": "hpu_duo.cost.model",
    "Prediction": "hpu_duo.cost.prediction",
    "PublishedRow": "hpu_duo.cost.published",
    "published_rows": "hpu_duo.cost.published",
    "published_sources": "hpu_duo.cost.published",
    "split_rows": "hpu_duo.cost.published",
    "Efficiency": "hpu_duo.cost.roofline",
    "Seconds": "hpu_duo.cost.roofline",
    "predict_seconds": "hpu_duo.cost.roofline",
    "roof_seconds": "hpu_duo.cost.roofline",
    "SECONDS_PER_GRAPH": "hpu_duo.cost.warm_up",
    "TRACE_S_PER_OPERATOR": "hpu_duo.cost.warm_up",
    "WarmUp": "hpu_duo.cost.warm_up",
    "graph_scale": "hpu_duo.cost.warm_up",
    "Formats": "hpu_duo.cost.work",
    "Step": "hpu_duo.cost.work",
    "Work": "hpu_duo.cost.work",
    "step_work": "hpu_duo.cost.work",
}


def __getattr__(name: str) -> Any:
    # Most of their modules know the kinds of heads and so torch, which a model's sizes alone do not need.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
