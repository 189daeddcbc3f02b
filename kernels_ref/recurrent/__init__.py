"""Recurrences over flattened tokens: states of a fixed size for each row, instead of keys and values."""

from kernels_ref.recurrent.convolution import Convolution, causal_convolution
from kernels_ref.recurrent.delta_rule import DeltaInputs, DeltaRule
from kernels_ref.recurrent.kind import Recurrence
from kernels_ref.recurrent.state_space import ScanInputs, StateSpace

__all__ = [
    "Convolution",
    "DeltaInputs",
    "DeltaRule",
    "Recurrence",
    "ScanInputs",
    "StateSpace",
    "causal_convolution",
]
