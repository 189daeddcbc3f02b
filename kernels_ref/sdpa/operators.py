"""Register functions that read the plan as opaque operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NAMESPACE = "hpu_duo_kernels"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def register(
    name: str, arguments: str, function: Callable[..., Any], *, weighs: bool = False
) -> Callable[..., Any]:
    """Make a CPU operator that returns a partial shaped like its first argument.

    Args:
        arguments: its schema; the first is the queries ``[*, K, G, D]``.
        function: called with CPU tensors; may read them.
        weighs: it also returns a number for each slot of its second argument, ``[*, K, S]``.
    """
    returned = f"(Tensor, Tensor, Tensor{', Tensor' if weighs else ''})"
    return define(name, arguments, returned, function, _weighed_shapes if weighs else _shapes)


def define(
    name: str, arguments: str, returned: str, function: Callable[..., Any], shapes: Callable[..., Any]
) -> Callable[..., Any]:
    """Make a CPU operator.

    Args:
        arguments, returned: its schema.
        function: called with CPU tensors; may read them.
        shapes: the same, with empty tensors.
    """
    _library.define(f"{name}({arguments}) -> {returned}")
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", shapes, lib=_library)
    operator: Callable[..., Any] = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return operator


def _shapes(queries: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    attn = queries.new_empty(queries.shape, dtype=torch.float32)
    return attn, attn.new_empty(attn.shape[:-1]), attn.new_empty(attn.shape[:-1])


def _weighed_shapes(queries: torch.Tensor, keys: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    return *_shapes(queries), queries.new_empty(*queries.shape[:2], keys.shape[2], dtype=torch.float32)
