"""Causal and streaming attention for training, per KV head, registered with transformers.

Shape legend: B batch, T tokens, H query heads, K KV heads, G query heads per KV head, D head size,
C tokens per chunk, N chunks, S sink tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.llama.modeling_llama import LlamaAttention

ATTENTION_NAME = "duo_training"
_FLOOR = -1e4


@dataclass(frozen=True)
class HeadPlan:
    """KV heads that see everything; the others see the first ``sink`` and the last ``recent`` tokens.

    The rule: token ``p`` of a streaming head sees ``k`` if ``k < sink`` or ``p - recent < k <= p``.

    Attributes:
        retrieval: for each layer the KV heads with full causal attention.
        sink, recent: tokens; ``recent`` counts the token itself.
    """

    retrieval: tuple[tuple[int, ...], ...]
    sink: int
    recent: int


def register() -> None:
    """Make ``attn_implementation="duo_training"`` available; the model call then takes ``head_plan``."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)


def _attention(
    module: LlamaAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    head_plan: HeadPlan | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Signature of ``AttentionInterface``: query [B, H, T, D], key and value [B, K, T, D] -> [B, T, H, D]."""
    num_kv_heads = key.shape[1]
    q_BKGTD = query.unflatten(1, (num_kv_heads, -1))
    full = range(num_kv_heads) if head_plan is None else head_plan.retrieval[module.layer_idx]
    order = [*full, *(head for head in range(num_kv_heads) if head not in full)]
    parts = []
    if full:
        heads = order[: len(full)]
        parts.append(causal(q_BKGTD[:, heads], key[:, heads], value[:, heads], scaling))
    if head_plan is not None and len(full) < num_kv_heads:
        heads = order[len(full) :]
        qkv = q_BKGTD[:, heads], key[:, heads], value[:, heads]
        parts.append(banded(*qkv, scaling, head_plan.sink, head_plan.recent))
    back = [order.index(head) for head in range(num_kv_heads)]
    return torch.cat(parts, dim=1)[:, back].flatten(1, 2).transpose(1, 2), None


def causal(q_BKGTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float) -> Tensor:
    """Full causal attention -> [B, K, G, T, D]."""
    T = q_BKGTD.shape[3]
    if T > 512:
        k, v = (
            x.unsqueeze(2).expand(-1, -1, q_BKGTD.shape[2], -1, -1).flatten(1, 2) for x in (k_BKTD, v_BKTD)
        )
        out = F.scaled_dot_product_attention(q_BKGTD.flatten(1, 2), k, v, is_causal=True, scale=scale)
        return out.unflatten(1, q_BKGTD.shape[1:3])
    # Explicit products beat the fused CPU kernel on short sequences.
    mask = torch.full((T, T), _FLOOR, dtype=q_BKGTD.dtype, device=q_BKGTD.device).triu(1)
    probs = ((q_BKGTD * scale) @ k_BKTD.unsqueeze(2).transpose(-1, -2)).add(mask).softmax(-1)
    return probs @ v_BKTD.unsqueeze(2)


def banded(q_BKGTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float, sink: int, recent: int) -> Tensor:
    """Streaming attention in chunks of ``recent`` tokens -> [B, K, G, T, D]; cost grows linearly with T.

    Chunk n needs the keys of chunks n - 1 and n, and the sink. T must be a multiple of ``recent``.
    """
    B, K, G, T, D = q_BKGTD.shape
    C, sink = recent, min(sink, T)
    N = T // C
    assert N * C == T, f"T={T} is not a multiple of recent={recent}"
    q = (q_BKGTD * scale).unflatten(3, (N, C)).transpose(2, 3).reshape(B, K, N, G * C, D)
    k_band, v_band = (_with_previous_chunk(x.unflatten(2, (N, C))) for x in (k_BKTD, v_BKTD))
    k_sink, v_sink = k_BKTD[:, :, :sink], v_BKTD[:, :, :sink]
    band_mask, sink_mask = (x.to(q.device, q.dtype) for x in _banded_masks(N, C, sink))
    in_band = (q @ k_band.transpose(-1, -2)).unflatten(3, (G, C)) + band_mask
    in_sink = (q @ k_sink.unsqueeze(2).transpose(-1, -2)).unflatten(3, (G, C)) + sink_mask
    probs = torch.cat((in_sink, in_band), dim=-1).softmax(-1).flatten(3, 4)
    out = probs[..., :sink] @ v_sink.unsqueeze(2) + probs[..., sink:] @ v_band
    return out.unflatten(3, (G, C)).transpose(2, 3).reshape(B, K, G, T, D)


def _with_previous_chunk(x_BKNCD: Tensor) -> Tensor:
    previous = F.pad(x_BKNCD[:, :, :-1], (0, 0, 0, 0, 1, 0))
    return torch.cat((previous, x_BKNCD), dim=3)


def _banded_masks(N: int, C: int, S: int) -> tuple[Tensor, Tensor]:
    """Additive masks [N, 1, C, 2C] and [N, 1, C, S]; a sink key inside the window counts as window."""
    p = torch.arange(N * C).view(N, 1, C, 1)
    k_band = (torch.arange(N).view(N, 1) - 1) * C + torch.arange(2 * C)
    k_band = k_band.view(N, 1, 1, 2 * C)
    in_band = (k_band >= 0) & (k_band <= p) & (k_band > p - C)
    in_sink = torch.arange(S) <= p - C
    return torch.where(in_band, 0.0, _FLOOR), torch.where(in_sink, 0.0, _FLOOR)
