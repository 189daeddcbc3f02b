"""Costs of a model on Gaudi 2 and Gaudi 3: memory, concurrency, predicted speed.

From public sources only; see docs/cost-model.md. No Gaudi was measured by this project.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpu_duo.planning.capacities import (
        Capacity,
        CapacityPoint,
        Deployment,
        capacity,
        step_cost,
        step_limits,
    )
    from hpu_duo.planning.engine_work import (
        SECONDS_PER_GRAPH,
        TRACE_S_PER_OPERATOR,
        EngineWork,
        busiest_rank,
        graph_scale,
    )
    from hpu_duo.planning.fit import (
        PublishedRow,
        Step,
        published_rows,
        published_sources,
        split_rows,
        step_work,
    )
    from hpu_duo.planning.kept import KeptByHeads
    from hpu_duo.planning.model import (
        GAUDI2,
        GAUDI3,
        HARDWARE_NAMES,
        AttentionSize,
        Experts,
        Format,
        Hardware,
        ModelSize,
        find_hardware,
    )
    from hpu_duo.planning.predictions import ERROR_FACTORS, Prediction, WarmUp
    from hpu_duo.planning.roofline import (
        FITTED,
        Efficiency,
        Seconds,
        predict_seconds,
        roof_seconds,
    )
    from hpu_duo.planning.work import (
        FUSED,
        PORTABLE,
        PUBLISHED_LAYER_LAUNCHES,
        Formats,
        KernelWork,
        Work,
        kernels_of,
    )

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
    "Capacity": "hpu_duo.planning.capacities",
    "CapacityPoint": "hpu_duo.planning.capacities",
    "capacity": "hpu_duo.planning.capacities",
    "step_cost": "hpu_duo.planning.capacities",
    "step_limits": "hpu_duo.planning.capacities",
    "Deployment": "hpu_duo.planning.capacities",
    "Serving": "hpu_duo.planning.serving",
    "EngineWork": "hpu_duo.planning.engine_work",
    "busiest_rank": "hpu_duo.planning.engine_work",
    "ERROR_FACTORS": "hpu_duo.planning.predictions",
    "FITTED": "hpu_duo.planning.roofline",
    "GAUDI2": "hpu_duo.planning.model",
    "GAUDI3": "hpu_duo.planning.model",
    "HARDWARE_NAMES": "hpu_duo.planning.model",
    "Format": "hpu_duo.planning.model",
    "Hardware": "hpu_duo.planning.model",
    "find_hardware": "hpu_duo.planning.model",
    "KeptByHeads": "hpu_duo.planning.kept",
    "PUBLISHED_LAYER_LAUNCHES": "hpu_duo.planning.work",
    "KernelWork": "hpu_duo.planning.work",
    "FUSED": "hpu_duo.planning.work",
    "PORTABLE": "hpu_duo.planning.work",
    "kernels_of": "hpu_duo.planning.work",
    "AttentionSize": "hpu_duo.planning.model",
    "Experts": "hpu_duo.planning.model",
    "ModelSize": "hpu_duo.planning.model",
    "Prediction": "hpu_duo.planning.predictions",
    "PublishedRow": "hpu_duo.planning.fit",
    "published_rows": "hpu_duo.planning.fit",
    "published_sources": "hpu_duo.planning.fit",
    "split_rows": "hpu_duo.planning.fit",
    "Efficiency": "hpu_duo.planning.roofline",
    "Seconds": "hpu_duo.planning.roofline",
    "predict_seconds": "hpu_duo.planning.roofline",
    "roof_seconds": "hpu_duo.planning.roofline",
    "SECONDS_PER_GRAPH": "hpu_duo.planning.engine_work",
    "TRACE_S_PER_OPERATOR": "hpu_duo.planning.engine_work",
    "WarmUp": "hpu_duo.planning.predictions",
    "graph_scale": "hpu_duo.planning.engine_work",
    "Formats": "hpu_duo.planning.work",
    "Step": "hpu_duo.planning.fit",
    "Work": "hpu_duo.planning.work",
    "step_work": "hpu_duo.planning.fit",
}


def __getattr__(name: str) -> Any:
    # Most of their modules import kinds of heads and so torch, which sizes of a model do not need.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
