"""Static shapes and capture: which shapes a step may take, where its inputs lie, and how it is captured."""

from graphs.backends import CaptureBackend, EagerBackend, make_backend
from graphs.buffers import DeviceInputs, FieldSlot, HostInputs, Layout
from graphs.cache import GraphCache, GraphCounters, GraphMissError, MissPolicy
from graphs.cost import CostFunction, SkippingCost, StepCost
from graphs.exponential import ExponentialRule
from graphs.launches import Launches
from graphs.limits import CARD_STEP_TOKENS, StepLimits
from graphs.recompile import RecompileError
from graphs.shape import BatchShape, Phase
from graphs.table import BucketTable, Miss

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
