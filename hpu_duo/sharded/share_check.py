"""Refusals of families whose shares are more than smaller models, before weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpu_duo.device.ranks import Ranks
from hpu_duo.modeling.attention import AttentionCall
from hpu_duo.modeling.loading import build_without_weights
from hpu_duo.modeling.probe import DecoderLayer, read_layers
from hpu_duo.sharded.config import narrowed_config
from hpu_duo.sharded.cuts import Cutter
from hpu_duo.sharded.experts import ExpertShare
from hpu_duo.sharded.fit import Fit
from hpu_duo.sharded.heads import RankHeads
from hpu_duo.sharded.loading import make_cutter
from hpu_duo.sharded.summands import Share, check_summands
from hpu_duo.sharded.sums import Sums

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_share(
    path: str | Path,
    config: Any,
    dtype: torch.dtype,
    whole: PreTrainedModel,
    layers: Sequence[DecoderLayer],
    heads: Sequence[RankHeads],
    ranks: Ranks,
    experts: ExpertShare | None = None,
) -> None:
    """Check that slices of the weights are the weights of a smaller model of the family, by shapes alone.

    Args:
        path: directory of the checkpoint, for error messages.
        config: transformers' configuration of the whole model.
        whole: the whole model on ``meta``.
        layers: its layers.
        heads: the rank's heads of each layer.
        experts: that the rank holds whole; None = a part of the width of each.

    Raises:
        ValueError: transformers has no plan for the family, ranks cannot share it evenly, or something in it
            depends on the number of heads or on a width in another way. The message names family and module.
    """
    text = config.get_text_config()
    cutter = make_cutter(config, whole, layers, heads, ranks, experts)
    narrow_config = narrowed_config(config, layers[0].call.head_dim, ranks.size, experts)
    narrow = build_without_weights(path, narrow_config, dtype)
    Fit.of(cutter, whole, layers, narrow).apply(narrow)
    sums = Sums.of(cutter, whole, layers)
    _check_shapes(text.model_type, cutter, whole, narrow)
    _check_sums(text, cutter, whole, layers, sums)
    everybody = [Ranks(rank, ranks.size) for rank in range(ranks.size)]
    shares = [_share(config, whole, layers, narrow, each, experts) for each in everybody]
    check_summands(text.model_type, whole, layers, sums, shares)
    for number, (layer, share) in enumerate(zip(layers, _read_by_token(text.model_type, narrow, sums))):
        _check_attention(type(whole).__name__, number, layer, share, heads[number])


def _share(
    config: Any,
    whole: PreTrainedModel,
    layers: Sequence[DecoderLayer],
    narrow: PreTrainedModel,
    ranks: Ranks,
    experts: ExpertShare | None,
) -> Share:
    """A share of a rank with the first heads of each layer on the first rank."""
    heads = [RankHeads.of([range(each.call.num_kv_heads)], each.call.num_heads, ranks) for each in layers]
    cutter = make_cutter(config, whole, layers, heads, ranks, experts)
    return Share(ranks.rank, narrow, heads, cutter)


class _ByToken(nn.Module):
    """A table that can be read by tokens alone, as ranks have it."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(token_ids)
        return rows


def _read_by_token(family: str, narrow: PreTrainedModel, sums: Sums) -> tuple[DecoderLayer, ...]:
    """Return the layers of a share; refuse a model that cannot run as one, or reads a table by itself."""
    for path in sums.tables:
        parent, _, name = path.rpartition(".")
        setattr(narrow.get_submodule(parent), name, _ByToken(narrow.get_submodule(path)))
    try:
        return read_layers(narrow)
    except ValueError as error:
        raise ValueError(f"{family!r} cannot be served by several ranks: {error}") from error


def _check_shapes(family: str, cutter: Cutter, whole: nn.Module, narrow: nn.Module) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in narrow.state_dict().items()}
    for name, tensor in whole.state_dict().items():
        shape = cutter.cut_shape(name, tensor.shape)
        if shape != expected.get(name):
            fitting = list(expected[name]) if name in expected else None
            raise ValueError(
                f"{family!r} cannot be served by several ranks: expected slices of {name} that fit a model "
                f"with fewer heads and smaller widths, {fitting} of {list(tensor.shape)}, got {list(shape)}"
            )


def _check_sums(
    config: Any, cutter: Cutter, whole: PreTrainedModel, layers: Sequence[DecoderLayer], sums: Sums
) -> None:
    """Refuse a sum over ranks of what each of them has whole, and parts that nobody sums."""
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    _check_all_are_summed(config.model_type, cutter, whole, layers, sums)
    paths = {id(module): path for path, module in whole.named_modules()}
    for layer, own in zip(layers, sums.layers):
        for child in (layer.module.get_submodule(name) for name in own.children):
            found = [paths[id(part)] for part in child.modules() if "norm" in type(part).__name__.lower()]
            if found and child is not layer.attention:
                raise ValueError(
                    f"{config.model_type!r} cannot be served by several ranks: expected {paths[id(child)]}, "
                    f"whose outputs are summed, to have no norms, got {found[0]}"
                )
            for parameter in child.parameters():
                name, shape = names[id(parameter)], list(parameter.shape)
                is_output = len(shape) > 1 and shape[-2] == config.hidden_size
                if is_output and cutter.cut(name, shape) is None:
                    raise ValueError(
                        f"{config.model_type!r} cannot be served by several ranks: expected ranks to share "
                        f"{name}, whose outputs are summed, got all of {shape} on each"
                    )


def _check_all_are_summed(
    family: str, cutter: Cutter, whole: PreTrainedModel, layers: Sequence[DecoderLayer], sums: Sums
) -> None:
    """Refuse parts of a tensor outside of all modules whose outputs ranks sum or gather."""
    modules = [
        layer.module.get_submodule(name) for layer, own in zip(layers, sums.layers) for name in own.children
    ]
    modules += [whole.get_submodule(path) for path in sums.tables]
    if (head := whole.get_output_embeddings()) is not None:
        modules.append(head)
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    for name, parameter in whole.named_parameters():
        if id(parameter) not in known and cutter.cut(name, parameter.shape) is not None:
            raise ValueError(
                f"{family!r} cannot be served by several ranks: expected them to share weights of modules "
                f"beside the attention, whose outputs are summed, got {name}"
            )


def _check_attention(
    name: str, number: int, whole: DecoderLayer, share: DecoderLayer, heads: RankHeads
) -> None:
    """Refuse a family whose attention depends on the number of heads in other ways than its sizes do."""
    expected, got = _traits(whole.call), _traits(share.call)
    expected = (len(heads.query), len(heads.kv), *expected[2:])
    if expected != got:
        raise ValueError(
            f"{name}, layer {number}, cannot be served by several ranks: expected attention with (query "
            f"heads, key/value heads, head size, scale, window, soft cap, sink logits) {expected} in a "
            f"share, got {got}"
        )


def _traits(call: AttentionCall) -> tuple[object, ...]:
    return (
        *(call.num_heads, call.num_kv_heads, call.head_dim, call.scale),
        *(call.sliding_window, call.softcap, call.has_sinks),
    )
