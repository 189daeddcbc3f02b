"""Frequencies of a model's rotary embedding, for heads that turn queries themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hpu_duo.modeling.attention import Probe, attending, placeholder_mask
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.modeling.trial import refusing
from kernels_ref.rotary import turned, turns

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POSITIONS = (0, 1, 7, 60)
_TOLERANCE = {torch.float32: 1e-3}
_ROUNDED = 3e-2
"""Largest relative error of queries in narrower types."""


@dataclass
class _Queries(Probe):
    """Notes the queries of each layer, ``[H, T, D]``, besides its calls."""

    queries: dict[int, torch.Tensor] = field(default_factory=dict)

    def record(self, module: Any, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.queries[id(module)] = q[0].float()
        return super().record(module, q, *rest)


@torch.inference_mode()
def rotary_frequencies(
    model: PreTrainedModel, layers: Sequence[DecoderLayer]
) -> tuple[tuple[float, ...] | None, ...]:
    """Return the frequencies by which each layer turns the halves of its heads against each other.

    They are those of a rotary module of the model that a trial bears out: with attention that returns zeros,
    the queries of one token at several positions have to be the same ones, turned. So interleaved embeddings,
    positions of another kind, and layers without any are told apart, whatever the family.

    Args:
        model: with weights.

    Returns:
        Radians for each position, for each layer; None where nothing known explains its queries.
    """
    device = next(model.parameters()).device
    vocab_size = model.config.get_text_config().vocab_size
    # Two tokens, since one might be padding, whose embedding is zero.
    ids = [11 % vocab_size, 7930 % vocab_size]
    tokens = torch.tensor([ids]).repeat_interleave(len(_POSITIONS), dim=1).to(device)
    position = torch.tensor([_POSITIONS * len(ids)]).to(device)
    seen = _Queries()
    with refusing(model), attending(model, seen):
        model(
            input_ids=tokens,
            position_ids=position,
            attention_mask=placeholder_mask(device),
            use_cache=False,
        )
    known = {
        tuple(buffer.float().tolist())
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and "original" not in name and buffer.ndim == 1
    }
    tolerance = _TOLERANCE.get(model.dtype, _ROUNDED)
    return tuple(
        next((each for each in known if _explains(each, seen.queries[id(layer.attention)], tolerance)), None)
        for layer in layers
    )


def _explains(frequencies: tuple[float, ...], q_HTD: torch.Tensor, tolerance: float) -> bool:
    """Whether queries at other positions are those at position 0, turned by these frequencies."""
    if 2 * len(frequencies) > q_HTD.shape[-1]:
        return False
    by_token = q_HTD.unflatten(1, (-1, len(_POSITIONS)))
    position = torch.tensor(_POSITIONS, dtype=torch.int32, device=q_HTD.device)
    expected = turned(by_token[:, :, :1].expand_as(by_token), turns(position, frequencies))
    error = (expected - by_token).norm() / by_token.norm().clamp(min=1e-12)
    return bool(error <= tolerance) and bool(by_token.norm() > 0)
