"""Attention of one layer: store, run the parts of the step, merge.

Shapes: Q query tokens, H query heads, K key/value heads of which the first Kr are retrieval
heads and the other Ks streaming heads, G = H / K, D head size, N rows of up to M decoded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from bias_builders import Window
from kernels_ref.impl import Implementation, kernels
from kernels_ref.index import gather
from kernels_ref.partial import Partial, fold, unfold
from kernels_ref.scoring import Scoring, Softmax
from kernels_ref.step import Step
from kernels_ref.units import KVUnits, NewKV


@dataclass(frozen=True)
class LayerSpec:
    """What the attention of a layer needs to know besides tensors; fixed for a captured step.

    Attributes:
        num_retrieval, num_streaming: key/value heads of each kind (Kr, Ks).
        group_size: query heads per key/value head.
        head_dim: size of keys and of values.
        scale: factor of the scores.
        window: of the streaming heads; None when there are none.
        softcap: bound of the scores, None when the model has none.
        impl: which kernels compute the parts.
        softmax: in which numbers scores and exponentials are.
    """

    num_retrieval: int
    num_streaming: int
    group_size: int
    head_dim: int
    scale: float
    window: Window | None
    softcap: float | None
    impl: Implementation
    softmax: Softmax = Softmax.EXACT

    @property
    def scoring(self) -> Scoring:
        """How the scores of the layer become weights."""
        return Scoring(self.softcap, self.softmax)


class LayerCache(NamedTuple):
    """Stores of one layer; sizes of absent head kinds are zero.

    Attributes:
        blocks: ``num_blocks + 1`` units of Kr heads and B slots; the last block is trash.
        rings: ``R + 1`` units of Ks heads and W slots; the last row is trash.
    """

    blocks: KVUnits
    rings: KVUnits


def unified_attention(
    q_QHD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    cache: LayerCache,
    step: Step,
    spec: LayerSpec,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store the new keys and values and attend with every head of a layer.

    Args:
        q_QHD, k_QKD, v_QKD: after rotary embedding; heads in retrieval-first order.
        cache: written in place.
        sinks_H: learned attention-sink logit of each query head.
    Returns:
        ``[Q, H, D]`` in the dtype of ``q_QHD``; zero for padding.
    """
    kr, group = spec.num_retrieval, spec.group_size
    q_QKGD = (q_QHD * spec.scale).unflatten(1, (-1, group))
    sinks_KG = None if sinks_H is None else sinks_H.view(-1, group)
    outputs = []
    if kr:
        sinks = None if sinks_KG is None else sinks_KG[:kr]
        new = NewKV(k_QKD[:, :kr], v_QKD[:, :kr])
        outputs.append(_retrieval(q_QKGD[:, :kr], new, cache.blocks, step, spec, sinks))
    if spec.num_streaming:
        sinks = None if sinks_KG is None else sinks_KG[kr:]
        new = NewKV(k_QKD[:, kr:], v_QKD[:, kr:])
        outputs.append(_streaming(q_QKGD[:, kr:], new, cache.rings, step, spec, sinks))
    out_QKGD = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return out_QKGD.flatten(1, 2)


def _retrieval(
    q_QKGD: torch.Tensor,
    new: NewKV,
    units: KVUnits,
    step: Step,
    spec: LayerSpec,
    sinks_KG: torch.Tensor | None,
) -> torch.Tensor:
    run, t, parts = kernels(spec.impl), step.tensors, step.parts
    run.write_kv(units, step.block_index[units.layout], new)
    of_tokens: list[Partial] = []
    if parts.causal:
        of_tokens.append(run.causal(q_QKGD, new, t, None, spec.scoring))
    if parts.shared and t.shared_block.shape[0]:
        of_tokens.append(run.shared_blocks(q_QKGD, units, t, spec.scoring))
    of_rows = None
    if parts.unique:
        of_rows = run.unique_blocks(_of_rows(q_QKGD, step), units, t, step.blocks, spec.scoring)
        of_rows = unfold(of_rows, step.decode_len)
    return run.finish(q_QKGD, of_tokens, of_rows, step.decode_slot, sinks_KG)


def _streaming(
    q_QKGD: torch.Tensor,
    new: NewKV,
    units: KVUnits,
    step: Step,
    spec: LayerSpec,
    sinks_KG: torch.Tensor | None,
) -> torch.Tensor:
    run, t, parts = kernels(spec.impl), step.tensors, step.parts
    assert spec.window is not None, "streaming heads need a window"
    ring = step.rings[spec.window, units.layout]
    of_tokens: list[Partial] = []
    of_rows = None
    if parts.unique:
        run.write_kv(units, ring.index_before, new)
        of_rows = run.unique_rings(_of_rows(q_QKGD, step), units, ring, spec.scoring)
        of_rows = unfold(of_rows, step.decode_len)
    if parts.causal:
        of_tokens.append(run.causal(q_QKGD, new, t, spec.window, spec.scoring))
        if parts.shared:
            of_tokens.append(run.shared_rings(q_QKGD, units, t, ring, spec.window, spec.scoring))
        # Only now: the chunk has read what these tokens replace.
        run.write_kv(units, ring.index_after, new)
    return run.finish(q_QKGD, of_tokens, of_rows, step.decode_slot, sinks_KG)


def _of_rows(q_QKGD: torch.Tensor, step: Step) -> torch.Tensor:
    """Queries of decode rows, all tokens of a row in its heads, ``[N, K, M * G, D]``."""
    return fold(gather(q_QKGD, step.row_token), step.decode_len)
