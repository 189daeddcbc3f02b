"""The kernels as torch operators: registered without Triton, which is imported at the first launch.

An operator is opaque to torch.compile, and its fake returns the shapes, so a captured step contains the
launch and not its Python code. No launch waits for the device, and no grid depends on data.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch

from kernels_ref.triton.availability import require
from kernels_ref.triton.launch import Triple, partials

_NAMESPACE = "hpu_duo_triton"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")
_MODULES = {
    **dict.fromkeys(("leading_rings", "held_rings", "rings_with_weights", "shared_rings"), "rings"),
    **dict.fromkeys(("sparse_causal", "sparse_shared", "sparse_unique"), "rules"),
    **dict.fromkeys(("merge_runs", "merge_splits", "finish"), "merging"),
    "seen_blocks": "shared_blocks",
}


def register(name: str, arguments: str, returns: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator for CUDA, and for CPU under Triton's interpreter.

    Args:
        name: of the operator, and of the function that launches its kernel; the module of the function has
            that name too, or is one of ``_MODULES``.
        arguments, returns: its schema; the first argument is a tensor.
        fake: from the arguments to empty results.
    Returns:
        the operator. It raises ``ValueError`` where Triton cannot run.
    """

    def run(first: torch.Tensor, *rest: Any) -> Any:
        require(first.device)
        function = getattr(import_module(f"kernels_ref.triton.{_MODULES.get(name, name)}"), name)
        with _current(first.device):
            return function(first, *rest)

    _library.define(f"{name}({arguments}) -> {returns}")
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def _current(device: torch.device) -> AbstractContextManager[Any]:
    # Triton launches on the current device, whatever its arguments are on.
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _triple(queries: torch.Tensor, *_: object) -> Triple:
    return partials(queries, queries.shape[0])


def _weighed(queries: torch.Tensor, keys: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    triple = _triple(queries)
    return *triple, triple[0].new_empty((*queries.shape[:2], keys.shape[2]))


def _sums(
    queries: torch.Tensor,
    lse: torch.Tensor,
    keys: torch.Tensor,
    slots: torch.Tensor | None,
    start: torch.Tensor,
    num_new: torch.Tensor,
    token: torch.Tensor,
    *_: object,
) -> torch.Tensor:
    num_slots = 0 if slots is None else slots.shape[2]
    return lse.new_empty((token.shape[0], queries.shape[1], num_slots + token.shape[1]))


def _nothing(*_: object) -> None:
    return None


def _output(queries: torch.Tensor, *_: object) -> torch.Tensor:
    return queries.new_empty(queries.shape)


def _product(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    num_outputs: int,
    *_: object,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)


_TRIPLE = "(Tensor, Tensor, Tensor)"
_QKV = "Tensor q, Tensor k, Tensor v"
_KINDS = "Tensor? k_meta=None, Tensor? v_meta=None, int keys=0, int values=0"
"""Of a store that may have codes; see ``launch.Stored``."""

causal = register(
    "causal",
    f"{_QKV}, Tensor causal_row, Tensor positions, Tensor row_query_start, "
    "int sink, int recent, float softcap",
    _TRIPLE,
    _triple,
)
shared_blocks = register(
    "shared_blocks",
    f"{_QKV}, Tensor row, Tensor row_start, Tensor shared_block, Tensor shared_start, Tensor shared_reads, "
    f"float softcap, {_KINDS}",
    _TRIPLE,
    _triple,
)
shared_rings = register(
    "shared_rings",
    f"{_QKV}, Tensor causal_row, Tensor positions, Tensor row_start, Tensor chunk_row, "
    "Tensor chunk_position, int sink, int recent, float softcap",
    _TRIPLE,
    _triple,
)
unique_blocks = register(
    "unique_blocks",
    f"{_QKV}, Tensor owner, Tensor tail_block, Tensor tail_visible, float softcap, {_KINDS}",
    _TRIPLE,
    _triple,
)
sparse_causal = register(
    "sparse_causal",
    f"{_QKV}, Tensor causal_row, Tensor positions, Tensor row_query_start, int[] rule, float softcap",
    _TRIPLE,
    _triple,
)
sparse_shared = register(
    "sparse_shared",
    f"{_QKV}, Tensor row, Tensor positions, Tensor row_start, Tensor shared_block, Tensor shared_start, "
    f"Tensor shared_reads, int[] rule, float softcap, {_KINDS}",
    _TRIPLE,
    _triple,
)
sparse_unique = register(
    "sparse_unique",
    f"{_QKV}, Tensor owner, Tensor owner_start, Tensor tail_block, Tensor tail_start, Tensor tail_visible, "
    f"Tensor end, int[] rule, float softcap, {_KINDS}",
    _TRIPLE,
    _triple,
)
leading_rings = register(
    "leading_rings",
    f"{_QKV}, Tensor visible, float softcap, {_KINDS}",
    _TRIPLE,
    _triple,
)
rings_with_weights = register(
    "rings_with_weights",
    f"{_QKV}, Tensor visible, Tensor? sinks, float softcap, {_KINDS}",
    "(Tensor, Tensor, Tensor, Tensor)",
    _weighed,
)
column_sums = register(
    "column_sums",
    "Tensor q, Tensor lse, Tensor k, Tensor? slots, Tensor start, Tensor num_new, Tensor token, "
    "int num_observed, float softcap",
    "Tensor",
    _sums,
)
held_rings = register(
    "held_rings",
    f"{_QKV}, Tensor position, Tensor begin, Tensor end, int sink, float softcap, {_KINDS}",
    _TRIPLE,
    _triple,
)
write_kv = register(
    "write_kv",
    "Tensor(a!) k_flat, Tensor(b!) v_flat, Tensor place, Tensor k, Tensor v",
    "()",
    _nothing,
)
finish = register(
    "finish",
    "Tensor like, Tensor[] of_tokens, Tensor[] of_rows, Tensor decode_slot, Tensor? sinks",
    "Tensor",
    _output,
)
linear_of_codes = register(
    "linear_of_codes",
    "Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, Tensor? input_scale, "
    "int num_outputs, int outputs, int inputs, int kind, int rounded_inputs",
    "Tensor",
    _product,
)
"""Inputs ``[..., K]`` times a weight of codes, transposed: ``[..., N]`` in the dtype of the inputs.

Arguments: codes ``[N, K]`` of a byte (those of e4m3 as uint8), or of 4 bits ``[N, ceil(K / 2)]``; scales and
zero points ``[ceil(N / outputs), ceil(K / inputs)]``, of any float and of uint8 or int8; a bias ``[N]``; N;
outputs and inputs that share a scale, where fewer inputs than K are a multiple of 32; the kind of the codes,
see ``launch.KINDS``; and how many inputs of a row share a scale when they are rounded to int8 or fp8, as the
codes are, 0 = they are not. ``input_scale`` is one for all then, None = it is computed.
"""
