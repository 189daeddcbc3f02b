"""Refusals of families whose shares are more than smaller models, before weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hpu_duo.device.ranks import Ranks
from hpu_duo.modeling.loading import build_without_weights
from hpu_duo.modeling.probe import DecoderLayer, read_layers
from hpu_duo.sharded.config import narrowed_config
from hpu_duo.sharded.cuts import Cutter
from hpu_duo.sharded.heads import RankHeads
from hpu_duo.sharded.loading import make_cutter
from hpu_duo.sharded.modules import summed_children, wide_norms


def check_share(
    path: str | Path,
    config: Any,
    dtype: torch.dtype,
    whole: PreTrainedModel,
    layers: Sequence[DecoderLayer],
    heads: Sequence[RankHeads],
    ranks: Ranks,
) -> None:
    """Check that slices of the weights are the weights of a smaller model of the family, by shapes alone.

    Args:
        path: directory of the checkpoint, for error messages.
        config: transformers' configuration of the whole model.
        whole: the whole model on ``meta``.
        layers: its layers.
        heads: the rank's heads of each layer.

    Raises:
        ValueError: transformers has no plan for the family, ranks cannot share it evenly, or something in it
            depends on the number of heads or on a width in another way. The message names family and module.
    """
    text = config.get_text_config()
    cutter = make_cutter(config, whole, layers, heads, ranks)
    narrow = build_without_weights(path, narrowed_config(config, layers[0].call.head_dim, ranks.size), dtype)
    for layer in layers:
        wide_norms(layer)
    _check_shapes(text.model_type, cutter, whole, narrow)
    _check_sums(text, cutter, whole, layers)
    for number, (layer, share) in enumerate(zip(layers, read_layers(narrow))):
        _check_attention(type(whole).__name__, number, layer, share, heads[number])


def _check_shapes(family: str, cutter: Cutter, whole: nn.Module, narrow: nn.Module) -> None:
    expected = {name: list(tensor.shape) for name, tensor in narrow.state_dict().items()}
    for name, tensor in whole.state_dict().items():
        shape = list(tensor.shape)
        if (cut := cutter.cut(name, shape)) is not None:
            shape[cut.dim] = sum(end - begin for begin, end in cut.spans)
        if shape != expected.get(name):
            raise ValueError(
                f"{family!r} cannot be served by several ranks: expected slices of {name} that fit a model "
                f"with fewer heads and smaller widths, {expected.get(name)} of {list(tensor.shape)}, "
                f"got {shape}"
            )


def _check_sums(config: Any, cutter: Cutter, whole: nn.Module, layers: Sequence[DecoderLayer]) -> None:
    """Refuse a sum over ranks of what each of them has whole, and would add once more."""
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    for _, child in (each for layer in layers for each in summed_children(layer)):
        for parameter in child.parameters():
            name, shape = names[id(parameter)], list(parameter.shape)
            is_output = len(shape) > 1 and shape[-2] == config.hidden_size
            if is_output and cutter.cut(name, shape) is None:
                raise ValueError(
                    f"{config.model_type!r} cannot be served by several ranks: expected ranks to share "
                    f"{name}, whose outputs are summed, got all of {shape} on each"
                )


def _check_attention(
    name: str, number: int, whole: DecoderLayer, share: DecoderLayer, heads: RankHeads
) -> None:
    """Refuse a family whose attention depends on the number of heads in other ways than its sizes do."""
    first, second = whole.call, share.call
    expected = (
        len(heads.query),
        len(heads.kv),
        first.head_dim,
        first.scale,
        first.sliding_window,
        first.softcap,
    )
    got = (
        *(second.num_heads, second.num_kv_heads, second.head_dim),
        *(second.scale, second.sliding_window, second.softcap),
    )
    if expected != got or first.has_sinks:
        raise ValueError(
            f"{name}, layer {number}, cannot be served by several ranks: expected attention with (query "
            f"heads, key/value heads, head size, scale, window, soft cap) {expected} in a share, got {got}"
            + (" and attention sinks" if first.has_sinks else "")
        )
