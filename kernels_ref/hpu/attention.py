"""Fused attention as partial triples, and the operators of Gaudi's software for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kernels_ref.partial import FLOOR, SEEN, Partial, Softmax, hiding, widened
from kernels_ref.units import gather

if TYPE_CHECKING:
    from kernels_ref.step import SlotMasks


def attend_dense(
    q_QKGD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    visible_QT: torch.Tensor,
    softmax: Softmax,
    inverse_scale: float,
) -> Partial:
    """Queries against one list of keys, whose scores are never in memory.

    The operator returns normalised attention, the largest score and the inverse of the sum: a triple whose
    sum is 1 and whose max is the log-sum-exp.

    Args:
        q_QKGD: scaled.
        k_TKD, v_TKD: finite also where hidden.
        inverse_scale: see ``FusedOperators``.

    Source: vllm-gaudi, ``SlicedFusedSDPA``, which passes a mask even where causality would suffice, because
    the operator's causal form returns other statistics.
    """
    tiles = q_QKGD[None], k_TKD[None], v_TKD[None], visible_QT[None]
    return Partial(*(x[0] for x in attend_tiles(*tiles, softmax, inverse_scale)))


def attend_tiles(
    q_XQKGD: torch.Tensor,
    k_XTKD: torch.Tensor,
    v_XTKD: torch.Tensor,
    visible_XQT: torch.Tensor,
    softmax: Softmax,
    inverse_scale: float,
) -> Partial:
    """``attend_dense`` of several slices of queries, each with keys of its own: ``[X, Q, K, G, ...]``."""
    hidden = hiding(q_XQKGD.dtype)
    mask_XQT = torch.where(visible_XQT, q_XQKGD.new_zeros(()), hidden)
    # [X, K, G, Q, D] and [X, K, 1, T, D]: keys are broadcast to the queries of a group.
    out, largest, inverse, _ = torch.ops.hpu.sdpa_recomp_fwd(
        q_XQKGD.permute(0, 2, 3, 1, 4).contiguous(),
        k_XTKD.transpose(1, 2).contiguous()[:, :, None],
        v_XTKD.transpose(1, 2).contiguous()[:, :, None],
        mask_XQT[:, None, None],
        0.0,
        1.0,
        False,
        True,
        _mode(softmax),
        None,
        "right",
    )
    attn, largest, inverse = (x.movedim(3, 1).float() for x in (out, largest, inverse))
    largest, inverse = largest[..., 0], inverse[..., 0]
    # The result of a query that sees no key is made of hidden keys.
    sees_any = largest > hidden / 2
    log_sum = largest - torch.log(inverse * inverse_scale)
    return Partial(
        torch.where(sees_any[..., None], attn, 0.0).contiguous(),
        torch.where(sees_any, log_sum, FLOOR).contiguous(),
        torch.where(sees_any, 1.0, 0.0),
    )


def attend_rows(
    q_NKHD: torch.Tensor,
    k_NKSD: torch.Tensor,
    v_NKSD: torch.Tensor,
    masks: SlotMasks,
    softmax: Softmax,
) -> torch.Tensor:
    """Decode rows against their own unit, and nothing else: normalised attention ``[N, K, H, D]``.

    Args:
        q_NKHD: scaled; H query heads of each key/value head, for each token of the row.
    """
    bias_NKMS = masks.bias
    assert bias_NKMS is not None, "expected masks with a bias"
    if bias_NKMS.shape[2] == 1:
        bias_NKMS = bias_NKMS.expand(-1, -1, q_NKHD.shape[2], -1)
    else:
        bias_NKMS = bias_NKMS.repeat_interleave(q_NKHD.shape[2] // bias_NKMS.shape[2], dim=2)
    # Whatever lies in unused slots, the sum of its score and the bias has to be finite.
    attn: torch.Tensor = torch.ops.hpu.sdpa_recomp_fwd(
        q_NKHD,
        k_NKSD.masked_fill(masks.unused, 0),
        v_NKSD.masked_fill(masks.unused, 0),
        bias_NKMS,
        0.0,
        1.0,
        False,
        True,
        _mode(softmax),
        None,
        "right",
    )[0]
    return attn


def _mode(softmax: Softmax) -> str:
    return "fast" if softmax is Softmax.FAST else "None"


ATTENTION, SOFTMAX, BLOCK_SOFTMAX = "sdpa_recomp_fwd", "softmax_fa2", "block_softmax"


class FusedOperators(NamedTuple):
    """The operators of ``torch.ops.hpu`` that are called; fixed for a captured step. See ``try_operators``.

    Attributes:
        attention: ``sdpa_recomp_fwd``.
        softmax: ``softmax_fa2``.
        block_softmax: ``block_softmax``.
        line_bytes: of the cache lines that ``softmax_fa2`` spreads its maxima and sums over, eight numbers in
            each, as a Gaudi 3 does; 0 where they lie side by side.
        inverse_scale: factor by which the inverse sum of ``sdpa_recomp_fwd`` has to be multiplied.
        row_attention: ``sdpa_recomp_fwd`` also for a batch of decode rows with a few queries each.
    """

    attention: bool = False
    softmax: bool = False
    block_softmax: bool = False
    line_bytes: int = 0
    inverse_scale: float = 1.0
    row_attention: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the operators that are called."""
        known = ((ATTENTION, self.attention), (SOFTMAX, self.softmax), (BLOCK_SOFTMAX, self.block_softmax))
        return tuple(name for name, is_called in known if is_called)


LINE_BYTES = 256
"""Cache lines of a Gaudi 3."""

NO_OPERATORS = FusedOperators()
"""No fused operators: every part is the reference's."""


def exists(name: str) -> bool:
    """Whether this process has a fused operator."""
    return hasattr(torch.ops.hpu, name)


_PACKED = 8
"""Numbers in a cache line of maxima or sums."""

_NOBODY = -1
"""Indicator of a block without softmax: a mark, and no index."""


def attend(
    scores: torch.Tensor, visible: torch.Tensor | None, values: torch.Tensor, line_bytes: int
) -> Partial:
    """The triple of scaled scores; see ``kernels_ref.partial.attend``.

    Args:
        line_bytes: see ``FusedOperators``.
    """
    if visible is not None:
        scores = torch.where(visible, scores, FLOOR)
    rows = scores.shape[:-1]
    numbers_of_line = line_bytes // scores.element_size()
    lines = -(-rows[-1] // _PACKED)
    stats = (*rows[:-1], lines * numbers_of_line) if line_bytes else rows
    weights, largest, total, _ = torch.ops.hpu.softmax_fa2(
        scores, inputM=scores.new_full(stats, FLOOR), inputL=scores.new_zeros(stats)
    )
    if line_bytes:
        largest, total = (
            x.unflatten(-1, (lines, numbers_of_line))[..., :_PACKED].flatten(-2)[..., : rows[-1]]
            for x in (largest, total)
        )
    largest, total = widened(largest), widened(total)
    attn = torch.matmul(weights.to(values.dtype), values).float()
    if visible is not None:
        sees_any = largest > SEEN
        total = torch.where(sees_any, total, 0.0)
        attn = torch.where(sees_any[..., None], attn, 0.0)
    return Partial(attn, largest, total)


def merge_by_owner(
    total: Partial, scores_XKHB: torch.Tensor, v_XKBD: torch.Tensor, owner: torch.Tensor
) -> Partial:
    """Merge whole blocks into the partials of their owners; see ``kernels_ref.reference.merge_by_owner``.

    Each block's weights are relative to its own largest score. ``block_softmax_adjustment`` does not fit
    here: it divides by the sum of all blocks of a row, which have to be merged with other parts.
    """
    num_rows, num_kv, heads, dim = total.attn.shape
    num_blocks, block_size = scores_XKHB.shape[0], scores_XKHB.shape[-1]
    owned = owner < num_rows
    bias = scores_XKHB.new_zeros(num_blocks, 1, 1, 1, block_size)
    weights, block_max, block_sum = torch.ops.hpu.block_softmax(
        scores_XKHB.unsqueeze(3), bias, torch.where(owned, owner, _NOBODY)
    )
    # A Gaudi 3 pads maxima and sums to whole vectors; those of skipped blocks are undefined.
    block_max, block_sum = (
        widened(x[:, : num_kv * heads]).view(num_blocks, num_kv, heads) for x in (block_max, block_sum)
    )
    attn = torch.matmul(weights[:, :, :, 0].to(v_XKBD.dtype), v_XKBD).float()
    row = torch.arange(num_rows, dtype=owner.dtype, device=owner.device)
    member_NX = row[:, None] == owner[None]
    largest = torch.where(member_NX[..., None, None], block_max[None], FLOOR).amax(dim=1)
    row_max = torch.maximum(total.max, largest)
    own_max = gather(row_max, torch.clamp(owner, max=num_rows - 1))
    scale = torch.exp(block_max - own_max)
    # Selecting, not multiplying, excludes a NaN of another owner's block from the product.
    owned_XKH = owned[:, None, None]
    attn = torch.where(owned_XKH[..., None], attn * scale[..., None], 0.0)
    sums = torch.where(owned_XKH, block_sum * scale, 0.0)
    member = member_NX.to(attn.dtype)
    decay = torch.exp(total.max - row_max)
    return Partial(
        torch.addcmul(
            torch.matmul(member, attn.view(num_blocks, -1)).view(num_rows, num_kv, heads, dim),
            total.attn,
            decay[..., None],
        ),
        row_max,
        torch.addcmul(
            torch.matmul(member, sums.view(num_blocks, -1)).view(num_rows, num_kv, heads), total.sum, decay
        ),
    )
