"""The parts of unified attention by Triton kernels; see ``kernels_ref.reference`` for what each computes.

Shapes: as in ``kernels_ref.reference``. Bad shapes, types, devices and layouts raise ``ValueError``; so
does a device on which Triton cannot run.
"""

from __future__ import annotations

import torch

from bias_builders import Window
from kernels_ref.partial import Partial
from kernels_ref.step import RingStep, StepTensors
from kernels_ref.triton import operators
from kernels_ref.triton.checks import (
    check_plan,
    check_queries,
    check_sinks,
    check_stores,
    check_triple,
    check_vectors,
)

_NO_WINDOW = Window(0, 0)


def causal(
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    t: StepTensors,
    window: Window | None,
    softcap: float | None,
) -> Partial:
    """New tokens of multi-token rows against the new keys of their own row."""
    check_queries("q_QKGD", q_QKGD)
    num_queries, num_heads, _, dim = q_QKGD.shape
    check_vectors("k_QKD", k_QKD, (num_queries, num_heads, dim), q_QKGD)
    check_vectors("v_QKD", v_QKD, (num_queries, num_heads, dim), q_QKGD)
    check_plan("causal_row", t.causal_row, (num_queries,), q_QKGD.device)
    check_plan("positions", t.positions, (num_queries,), q_QKGD.device)
    check_plan("row_query_start", t.row_query_start, (None,), q_QKGD.device)
    plan = (t.causal_row, t.positions, t.row_query_start)
    return Partial(*operators.causal(q_QKGD, k_QKD, v_QKD, *plan, *(window or _NO_WINDOW), softcap or 0.0))


def shared_blocks(
    q_QKGD: torch.Tensor, k_XKBD: torch.Tensor, v_XKBD: torch.Tensor, t: StepTensors, softcap: float | None
) -> Partial:
    """Every query against the blocks that more than one query reads."""
    check_queries("q_QKGD", q_QKGD)
    check_stores("k_XKBD", k_XKBD, "v_XKBD", v_XKBD, q_QKGD)
    num_rows, num_blocks = t.row_start.shape[0], t.shared_block.shape[0]
    check_plan("row", t.row, (q_QKGD.shape[0],), q_QKGD.device)
    check_plan("shared_block", t.shared_block, (None,), q_QKGD.device)
    check_plan("shared_visible", t.shared_visible, (num_rows + 1, num_blocks), q_QKGD.device)
    plan = (t.row, t.shared_block, t.shared_visible)
    return Partial(*operators.shared_blocks(q_QKGD, k_XKBD, v_XKBD, *plan, softcap or 0.0))


def shared_rings(
    q_QKGD: torch.Tensor,
    k_RKWD: torch.Tensor,
    v_RKWD: torch.Tensor,
    t: StepTensors,
    ring: RingStep,
    window: Window,
    softcap: float | None,
) -> Partial:
    """Tokens of multi-token rows against what their ring held before the step."""
    check_queries("q_QKGD", q_QKGD)
    check_stores("k_RKWD", k_RKWD, "v_RKWD", v_RKWD, q_QKGD)
    num_queries, device = q_QKGD.shape[0], q_QKGD.device
    check_plan("causal_row", t.causal_row, (num_queries,), device)
    check_plan("positions", t.positions, (num_queries,), device)
    check_plan("row_start", t.row_start, (None,), device)
    check_plan("chunk_row", t.chunk_row, (None,), device)
    check_plan("chunk_position", ring.chunk_position, (t.chunk_row.shape[0], k_RKWD.shape[2]), device)
    plan = (t.causal_row, t.positions, t.row_start, t.chunk_row, ring.chunk_position)
    return Partial(*operators.shared_rings(q_QKGD, k_RKWD, v_RKWD, *plan, *window, softcap or 0.0))


def unique_blocks(
    q_NKGD: torch.Tensor, k_XKBD: torch.Tensor, v_XKBD: torch.Tensor, t: StepTensors, softcap: float | None
) -> Partial:
    """Single-token rows against the blocks that only they read."""
    check_queries("q_NKGD", q_NKGD)
    check_stores("k_XKBD", k_XKBD, "v_XKBD", v_XKBD, q_NKGD)
    num_rows = q_NKGD.shape[0]
    check_plan("owner", t.owner, (None,), q_NKGD.device)
    check_plan("tail_block", t.tail_block, (num_rows,), q_NKGD.device)
    check_plan("tail_visible", t.tail_visible, (num_rows,), q_NKGD.device)
    if t.owner.shape[0] > k_XKBD.shape[0]:
        raise ValueError(
            f"expected owner to have at most {k_XKBD.shape[0]} entries, the blocks of k_XKBD, "
            f"got {t.owner.shape[0]}"
        )
    plan = (t.owner, t.tail_block, t.tail_visible)
    return Partial(*operators.unique_blocks(q_NKGD, k_XKBD, v_XKBD, *plan, softcap or 0.0))


def unique_rings(
    q_NKGD: torch.Tensor, k_RKWD: torch.Tensor, v_RKWD: torch.Tensor, ring: RingStep, softcap: float | None
) -> Partial:
    """Single-token rows against their own ring."""
    check_queries("q_NKGD", q_NKGD)
    check_stores("k_RKWD", k_RKWD, "v_RKWD", v_RKWD, q_NKGD)
    num_rows = q_NKGD.shape[0]
    check_plan("visible", ring.visible, (num_rows,), q_NKGD.device)
    if num_rows > k_RKWD.shape[0]:
        raise ValueError(f"expected k_RKWD to have at least {num_rows} rings, got {k_RKWD.shape[0]}")
    return Partial(*operators.unique_rings(q_NKGD, k_RKWD, v_RKWD, ring.visible, softcap or 0.0))


def write_kv(
    k_store: torch.Tensor,
    v_store: torch.Tensor,
    flat_index: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
) -> None:
    """Put the keys and values of new tokens in place; see ``kernels_ref.index.write_kv``."""
    check_queries("k_QKD", k_QKD[:, :, None])
    check_vectors("v_QKD", v_QKD, tuple(k_QKD.shape), k_QKD)
    check_stores("k_store", k_store, "v_store", v_store, k_QKD[:, :, None])
    if flat_index.dtype not in (torch.int32, torch.int64) or not flat_index.is_contiguous():
        raise ValueError(f"expected flat_index to be contiguous int32 or int64, got {flat_index.dtype}")
    if flat_index.shape != (k_QKD.shape[0] * k_QKD.shape[1],):
        raise ValueError(
            f"expected flat_index to have shape [{k_QKD.shape[0] * k_QKD.shape[1]}], "
            f"got {list(flat_index.shape)}"
        )
    if flat_index.device != k_QKD.device:
        raise ValueError(f"expected flat_index on {k_QKD.device}, got {flat_index.device}")
    operators.write_kv(k_store, v_store, flat_index, k_QKD, v_QKD)


def finish(
    q_QKGD: torch.Tensor,
    of_tokens: list[Partial],
    of_rows: Partial | None,
    single_row: torch.Tensor,
    sinks_KG: torch.Tensor | None,
) -> torch.Tensor:
    """Merge what tokens and what rows have seen, add sink logits, normalise; see ``kernels_ref.partial``."""
    check_queries("q_QKGD", q_QKGD)
    if len(of_tokens) > 2:
        raise ValueError(f"expected of_tokens to have at most 2 partials, got {len(of_tokens)}")
    check_plan("single_row", single_row, (q_QKGD.shape[0],), q_QKGD.device)
    for partial in of_tokens:
        check_triple("of_tokens", partial, q_QKGD, q_QKGD.shape[0])
    if of_rows is not None:
        check_triple("of_rows", of_rows, q_QKGD, None)
    if sinks_KG is not None:
        sinks_KG = sinks_KG.contiguous()
        check_sinks("sinks_KG", sinks_KG, q_QKGD)
    flat = [tensor for partial in of_tokens for tensor in partial]
    return operators.finish(q_QKGD, flat, list(of_rows or ()), single_row, sinks_KG)
