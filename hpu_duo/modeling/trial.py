"""A trial at load: does a flat batch give what transformers gives for each text alone?

The attention call does not show everything that a model does with a text. Biases that ride on the
mask, positions counted from the mask, layers that mix neighbouring tokens, and attention that looks
ahead all pass unseen, and would be served wrongly. So a few tiny texts are run both ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from bias_builders import Window, causal_mask
from hpu_duo.modeling.attention import NAME, AttentionCall, Trial, placeholder_mask
from hpu_duo.modeling.refusal import refusing

NUM_TEXTS = 4
TEXT_LEN = 4

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Largest relative error of the logits of a token."""

# Rounding may send a token of a mixture-of-experts model to another expert; a wrong model is wrong
# at most tokens: the texts are so short that their beginnings, where neighbours meet, are most of it.
_MAX_ROUNDED_SHARE = 0.5

_MAX_EXACT_ELEMENTS = 1 << 29
"""Weights of models up to this size are widened to float32 for the trial: 2 GiB for a moment."""


@torch.inference_mode()
def try_flat_batch(model: PreTrainedModel, calls: Sequence[AttentionCall]) -> None:
    """Run short texts side by side, attending as ``calls`` say, and compare with transformers' own run.

    Args:
        calls: what each layer asks of its attention, windows included.

    Raises:
        ValueError: the logits differ, so the model does something that its attention calls do not show.
    """
    device = next(model.parameters()).device
    vocab_size = model.config.get_text_config().vocab_size
    # Spread over the vocabulary, and every text different.
    tokens = (torch.arange(NUM_TEXTS * TEXT_LEN, device=device) * 7919 + 11) % vocab_size
    positions = torch.arange(TEXT_LEN, device=device).repeat(NUM_TEXTS)
    trial = DenseTrial({id(call.module): call for call in calls}, positions)
    texts = tokens.view(NUM_TEXTS, TEXT_LEN)
    with refusing(model), _exact(model):
        flat = model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=placeholder_mask(device),
            use_cache=False,
            hpu_duo_step=trial,
        ).logits[0]
        model.set_attn_implementation("eager")
        apart = model(input_ids=texts, attention_mask=torch.ones_like(texts), use_cache=False).logits
    model.set_attn_implementation(NAME)
    _compare(type(model).__name__, flat.float(), apart.flatten(0, 1).float(), flat.dtype)


@contextmanager
def _exact(model: nn.Module) -> Iterator[None]:
    """The model in float32 if it is small: deep random models blow rounding of bfloat16 up to anything."""
    narrow = [p for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32]
    if sum(p.numel() for p in narrow) > _MAX_EXACT_ELEMENTS:
        narrow = []
    kept = [p.data for p in narrow]
    for parameter in narrow:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, data in zip(narrow, kept):
            parameter.data = data


def _compare(name: str, flat: torch.Tensor, apart: torch.Tensor, dtype: torch.dtype) -> None:
    error = (flat - apart).abs().amax(dim=-1) / apart.abs().amax(dim=-1).clamp(min=1e-6)
    # A NaN is an error too.
    share_wrong = 1 - (error <= TOLERANCE[dtype]).float().mean().item()
    if share_wrong > _MAX_ROUNDED_SHARE:
        raise ValueError(
            f"{name} cannot be served: texts in one flat batch get other logits than transformers gives "
            f"each alone (relative error up to {error.max().item():.2g}); something beside its attention "
            "calls reads masks, counts positions or mixes neighbouring tokens"
        )


class DenseTrial(Trial):
    """Attention over the trial's texts, as the calls of a probed model describe it."""

    def __init__(self, calls: Mapping[int, AttentionCall], positions: torch.Tensor) -> None:
        self._calls, self._positions = calls, positions

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Dense attention of one layer: ``[1, heads, T, D]`` each to ``[1, T, heads, D]``."""
        # H query heads, K key/value heads, T tokens of all texts, D head size
        call = self._calls[id(module)]
        text = torch.arange(len(self._positions), device=q.device) // TEXT_LEN
        window = None if call.sliding_window is None else Window(0, call.sliding_window)
        visible_TT = causal_mask(text, self._positions, text, self._positions, NUM_TEXTS, window)
        group = call.num_heads // call.num_kv_heads
        k_HTD, v_HTD = (x[0].float().repeat_interleave(group, dim=0) for x in (k, v))
        scores_HTT = torch.matmul(q[0].float(), k_HTD.transpose(1, 2)) * call.scale
        if call.softcap is not None:
            scores_HTT = call.softcap * torch.tanh(scores_HTT / call.softcap)
        scores_HTT = scores_HTT.masked_fill(~visible_TT, torch.finfo(torch.float32).min)
        if sinks is not None:
            column = sinks.float().view(-1, 1, 1).expand(-1, scores_HTT.shape[1], 1)
            scores_HTT = torch.cat([scores_HTT, column], dim=-1)
        weights_HTT = torch.softmax(scores_HTT, dim=-1)[..., : len(text)]
        return torch.matmul(weights_HTT, v_HTD).to(q.dtype).transpose(0, 1)[None].contiguous()
