"""Placement of weights, keys and values, and activations on a device, its host and a disk."""

from __future__ import annotations

from hpu_duo.planning.offload.formula import (
    BLOCK_SIZE,
    FLEXGEN_T4,
    T4,
    Formula,
    OffloadMachine,
    OffloadModel,
    OffloadWork,
    Placement,
    Policy,
)
from hpu_duo.planning.offload.machines import offload_model, on_hardware
from hpu_duo.planning.offload.search import Found, PolicySearch
from hpu_duo.planning.offload.zigzag import ZigZag, spread

__all__ = [
    "BLOCK_SIZE",
    "FLEXGEN_T4",
    "T4",
    "Formula",
    "Found",
    "OffloadMachine",
    "OffloadModel",
    "OffloadWork",
    "Placement",
    "Policy",
    "PolicySearch",
    "ZigZag",
    "offload_model",
    "on_hardware",
    "spread",
]
