"""Checks of the arguments of kernels, which would read out of bounds with bad ones.

The functions raise ``ValueError``. Every message names the argument, what was expected, and what came.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bias_builders import Leading
from kernels_ref.step import RingStep
from kernels_ref.triton.availability import DTYPES, MAX_HEAD_DIM
from kernels_ref.units import KVUnits, Scratch

Size = int | None
"""An expected size, or None for any."""


def check_queries(name: str, q: torch.Tensor) -> None:
    """Queries, or new keys' pattern of them: ``[*, K, G, D]`` of a type and head size that kernels know."""
    check_vectors(name, q, (None, None, None, None))
    _check_dtype(name, q)
    if not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"expected {name} to have a head size of 1 to {MAX_HEAD_DIM}, got {q.shape[-1]}")


def check_vectors(
    name: str, x: torch.Tensor, shape: Sequence[Size], like: torch.Tensor | None = None
) -> None:
    """Vectors whose numbers lie side by side, and otherwise in any layout."""
    _check(name, x, shape, like)
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"expected {name} to have contiguous vectors, got strides {tuple(x.stride())}")


def check_units(units: KVUnits, q: torch.Tensor) -> None:
    """Units of the heads, type and device of the queries ``[*, K, G, D]``, keys and values alike.

    Vectors of a head lie side by side; heads and units may lie further apart, whole vectors each.
    """
    _check_stores("units", units.k, units.v, q)


def check_scratch(scratch: Scratch, q: torch.Tensor) -> None:
    """Copies of units, see ``check_units``."""
    _check_stores("scratch", *scratch, q)


def check_rings(q: torch.Tensor, units: KVUnits) -> None:
    """Queries of decode rows ``[N, K, *, D]``, and a ring for each row."""
    check_queries("q_NKHD", q)
    check_units(units, q)
    if q.shape[0] > units.k.shape[0]:
        raise ValueError(f"expected units.k to have at least {q.shape[0]} rings, got {units.k.shape[0]}")


def check_leading(ring: RingStep, q: torch.Tensor) -> torch.Tensor:
    """Slots that queries ``[N, K, *, D]`` see from the first one on; returns how many, ``[N, 1, 1]``."""
    if not isinstance(ring.seen, Leading):
        raise ValueError(
            f"expected slots that are seen from the first one on, got {type(ring.seen).__name__}"
        )
    check_plan("seen.visible", ring.seen.visible, (q.shape[0], 1, 1), q.device)
    return ring.seen.visible


def check_store(name: str, store: torch.Tensor, num_units: Size, q: torch.Tensor) -> None:
    """Keys or values of units alone, see ``check_units``."""
    _check(name, store, (num_units, q.shape[1], None, q.shape[-1]), q)
    dim, strides = store.shape[3], store.stride()
    if strides[2:] != (dim, 1) or strides[0] % dim or strides[1] % dim:
        raise ValueError(
            f"expected the vectors of a head of {name} to lie side by side, got strides {strides}"
        )


def _check_stores(what: str, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> None:
    for name, store in ((f"{what}.k", k), (f"{what}.v", v)):
        check_store(name, store, None, q)
    if k.shape != v.shape or k.stride() != v.stride():
        raise ValueError(
            f"expected {what}.v to lie like {what}.k, {list(k.shape)} with strides {k.stride()}, "
            f"got {list(v.shape)} with strides {v.stride()}"
        )


def check_flat(units: KVUnits, new: torch.Tensor) -> None:
    """Stores as lists of vectors like those of ``new [*, D]``, which lie side by side."""
    for name, flat in (("units.k_flat", units.k_flat), ("units.v_flat", units.v_flat)):
        _check(name, flat, (None, new.shape[-1]), new)
        if not flat.is_contiguous():
            raise ValueError(f"expected {name} to be contiguous, got strides {tuple(flat.stride())}")


def check_plan(name: str, plan: torch.Tensor, shape: Sequence[Size], device: torch.device) -> None:
    """An array of a step: int32, contiguous."""
    if plan.dtype != torch.int32:
        raise ValueError(f"expected {name} to be torch.int32, got {plan.dtype}")
    _check_shape(name, plan, shape)
    _check_device(name, plan, device)
    if not plan.is_contiguous():
        raise ValueError(f"expected {name} to be contiguous, got strides {tuple(plan.stride())}")


def check_triple(name: str, triple: Sequence[torch.Tensor], like: torch.Tensor, num: Size) -> None:
    """A partial of ``num`` tokens or rows over the heads of ``like [*, K, G, D]``: float32, contiguous."""
    for part, x in zip(("attn", "max", "sum"), triple):
        shape = (num, *like.shape[1:]) if part == "attn" else (num, *like.shape[1:-1])
        check_numbers(f"{name}.{part}", x, shape, like.device)
        num = x.shape[0]


def check_numbers(name: str, x: torch.Tensor, shape: Sequence[Size], device: torch.device) -> None:
    """Results of other parts: float32, contiguous."""
    _check_shape(name, x, shape)
    _check_device(name, x, device)
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(
            f"expected {name} to be contiguous torch.float32, got {x.dtype} with strides {tuple(x.stride())}"
        )


def check_sinks(name: str, sinks: torch.Tensor, q: torch.Tensor) -> None:
    """A logit for each query head of ``q [*, K, G, D]``, of any type that kernels know."""
    _check_shape(name, sinks, q.shape[1:3])
    _check_device(name, sinks, q.device)
    _check_dtype(name, sinks)


def _check_dtype(name: str, x: torch.Tensor) -> None:
    if x.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"expected {name} to be of one of {known}, got {x.dtype}")


def _check(name: str, x: torch.Tensor, shape: Sequence[Size], like: torch.Tensor | None) -> None:
    _check_shape(name, x, shape)
    if like is None:
        return
    if x.dtype != like.dtype:
        raise ValueError(f"expected {name} to be {like.dtype} like the queries, got {x.dtype}")
    _check_device(name, x, like.device)


def _check_shape(name: str, x: torch.Tensor, shape: Sequence[Size]) -> None:
    fits = x.dim() == len(shape) and all(want in (None, got) for want, got in zip(shape, x.shape))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"expected {name} to have shape [{wanted}], got {list(x.shape)}")


def _check_device(name: str, x: torch.Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"expected {name} on {device}, got {x.device}")
