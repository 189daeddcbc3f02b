"""Attention as partial triples: reference implementations and the composition of one layer."""

from kernels_ref.impl import Implementation
from kernels_ref.partial import FLOOR, Partial, empty, merge, normalise
from kernels_ref.step import Step, StepParts, StepTensors, prepare_step
from kernels_ref.unified import LayerCache, LayerSpec, unified_attention

__all__ = [
    "FLOOR",
    "Implementation",
    "LayerCache",
    "LayerSpec",
    "Partial",
    "Step",
    "StepParts",
    "StepTensors",
    "empty",
    "merge",
    "normalise",
    "prepare_step",
    "unified_attention",
]
