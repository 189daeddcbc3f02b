"""All uses of private names of torch's dispatcher, for traces and replays."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

__all__ = ["DispatchMode", "decides_sizes", "direct_function", "is_random", "share_memory", "writes"]


def direct_function(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind an operator of torch; ``func`` itself if it is no operator."""
    return getattr(func, "_op", func) if isinstance(func, torch._ops.OpOverload) else func


_COMPLETES = frozenset({"_c10d_functional::wait_tensor"})
"""Operators that return their written argument although their schemas do not declare it."""


def writes(func: Callable[..., Any]) -> bool | None:
    """Whether an operator writes to its arguments; None of code that is no operator, and may."""
    return _operator_writes(func) if isinstance(func, torch._ops.OpOverload) else None


@cache
def _operator_writes(func: torch._ops.OpOverload) -> bool:
    schema = func._schema
    return bool(schema.is_mutable) or schema.name in _COMPLETES


@cache
def is_random(func: Callable[..., Any]) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


@cache
def decides_sizes(func: Callable[..., Any]) -> bool:
    """Whether shapes of an operator's results depend on the contents of its arguments."""
    return torch.Tag.dynamic_output_shape in getattr(func, "tags", ())


def share_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are views of the same memory."""
    memory, other = (x.untyped_storage()._cdata for x in (left, right))
    return bool(memory == other)
