"""Static shapes and capture: buckets of steps, their input buffers, and capture backends."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphs.cache import GraphCache, GraphCounters, GraphMissError, MissPolicy, RecompileError
from graphs.limits import CARD_STEP_TOKENS, StepLimits
from graphs.shape import BatchShape, CostFunction, Launches, Phase, SkippingCost, StepCost
from graphs.table import BucketTable, ExponentialRule, Miss

if TYPE_CHECKING:
    from graphs.backends import CaptureBackend, EagerBackend, make_backend
    from graphs.buffers import DeviceInputs, FieldSlot, HostInputs, Layout

__all__ = [
    "CARD_STEP_TOKENS",
    "BatchShape",
    "BucketTable",
    "CaptureBackend",
    "CostFunction",
    "DeviceInputs",
    "EagerBackend",
    "ExponentialRule",
    "FieldSlot",
    "GraphCache",
    "GraphCounters",
    "GraphMissError",
    "HostInputs",
    "Launches",
    "Layout",
    "Miss",
    "MissPolicy",
    "Phase",
    "RecompileError",
    "SkippingCost",
    "StepCost",
    "StepLimits",
    "make_backend",
]

_HOMES = {
    "CaptureBackend": "graphs.backends",
    "EagerBackend": "graphs.backends",
    "make_backend": "graphs.backends",
    "DeviceInputs": "graphs.buffers",
    "FieldSlot": "graphs.buffers",
    "HostInputs": "graphs.buffers",
    "Layout": "graphs.buffers",
}


def __getattr__(name: str) -> Any:
    # Their modules import torch, which planning and simulation do not need.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
