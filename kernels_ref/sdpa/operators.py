"""Functions that read the plan, and writes in place, as opaque operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_ref import units as index
from kernels_ref.units import KVRecord, KVUnits

_NAMESPACE = "hpu_duo_kernels"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def register(
    name: str, arguments: str, function: Callable[..., Any], *, weighs: bool = False
) -> Callable[..., Any]:
    """Register a CPU operator that returns a partial shaped like its first argument.

    Args:
        arguments: its schema; the first is the queries ``[*, K, G, D]``.
        function: called with CPU tensors; may read them.
        weighs: whether it also returns a weight for each slot of its second argument, ``[*, K, S]``.
    """
    returned = f"(Tensor, Tensor, Tensor{', Tensor' if weighs else ''})"
    return define(name, arguments, returned, function, _shapes_with_weights if weighs else _shapes)


def define(
    name: str, arguments: str, returned: str, function: Callable[..., Any], shapes: Callable[..., Any]
) -> Callable[..., Any]:
    """Register a CPU operator.

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


def _shapes_with_weights(queries: torch.Tensor, keys: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    return *_shapes(queries), queries.new_empty(*queries.shape[:2], keys.shape[2], dtype=torch.float32)


def _write(
    k_flat: torch.Tensor, v_flat: torch.Tensor, place: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    index.write(k_flat, place, k)
    index.write(v_flat, place, v)


_store_library = torch.library.Library("hpu_duo_kernels", "FRAGMENT")
_store_library.define(
    "write_kv(Tensor(a!) k_flat, Tensor(b!) v_flat, Tensor place, Tensor k, Tensor v) -> ()"
)
_store_library.impl("write_kv", _write, "CPU")
torch.library.register_fake("hpu_duo_kernels::write_kv", lambda *_: None, lib=_store_library)


def write_as_operator(units: KVUnits, place: torch.Tensor, record: KVRecord) -> None:
    """``kernels_ref.units.write_kv`` as an operator that declares its mutations."""
    torch.ops.hpu_duo_kernels.write_kv.default(*units.tensors, place, *record.tensors)


# The compilers of torch 2.7 and 2.9 may copy a whole store that is written. That of 2.13 writes in place, and
# fuses the write into an existing loop.
write_kv = write_as_operator if torch.__version__ < "2.13" else index.write_kv
