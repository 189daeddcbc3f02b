"""Load one rank's share of a checkpoint: each rank reads its slices and no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpu_duo.device.ranks import Ranks
from hpu_duo.modeling.loading import build_without_weights, load_state, stored_codes
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.modeling.quantised.checkpoint import StoredTensor, stored_tensors
from hpu_duo.modeling.quantised.linear import DEQUANTISED, WeightExecution
from hpu_duo.modeling.quantised.state import StoredCodes
from hpu_duo.modeling.recurrent import number_of, recurrent_layers
from hpu_duo.modeling.transformers_internals import joined_parts
from hpu_duo.parallel.config import ExpertShare, RankHeads, check_plan, narrowed_config
from hpu_duo.parallel.cuts import Cut, Cutter, Fit, head_sizes
from hpu_duo.parallel.mixers import mixer_cuts
from hpu_duo.parallel.modules import token_tables

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_share(
    path: str | Path,
    config: Any,
    dtype: torch.dtype,
    whole: PreTrainedModel,
    layers: Sequence[DecoderLayer],
    heads: Sequence[RankHeads],
    ranks: Ranks,
    experts: ExpertShare | None = None,
    execution: WeightExecution = DEQUANTISED,
) -> PreTrainedModel:
    """Load the heads, widths and tokens of one rank, as a smaller model of the same family.

    Run alone it computes nothing useful: what its layers add are partial sums of what the whole model adds,
    see ``connect``. A bias of such a sum is on rank 0 only, and zero elsewhere.

    Args:
        path: directory of the checkpoint.
        config: transformers' configuration of the whole model.
        whole: the whole model on ``meta``.
        layers: its layers.
        heads: the rank's heads of each layer.
        experts: whole experts of the rank; None = a part of the width of each.
        execution: which quantised weights stay codes, and whether plain ones become codes: those of the whole
            weight, which is cut afterwards.

    Raises:
        ValueError: the family has no plan, ranks cannot share it evenly, or the weights cannot be read or do
            not have the shapes of the configuration.
    """
    cutter = make_cutter(config, whole, layers, heads, ranks, experts)
    narrow = narrowed_config(config, layers[0].call.head_dim, ranks.size, experts)
    fit = Fit.of(cutter, whole, layers, build_without_weights(path, narrow, dtype))
    joined = joined_parts(config.get_text_config().model_type)
    state = read_share(path, whole, cutter, ranks, dtype, joined)
    cut = {name: piece for name, piece in state.items() if not piece.is_padded}
    found = stored_codes(_stored(cut), whole, execution, dtype)
    codes = {name: replace(each, part=cut[name].part) for name, each in found.items()}
    # A vocabulary may be padded, which codes are not: an output head of measured scales is rounded and plain.
    padded = {name: piece for name, piece in state.items() if piece.is_padded}
    for name, each in stored_codes(_stored(padded), whole, execution, dtype).items():
        if each.rounding is not None:
            state[name] = replace(state[name], stored=each)
    return load_state(path, narrow, dtype, state, fit.apply, codes, execution)


def _stored(pieces: Mapping[str, Piece]) -> dict[str, StoredTensor]:
    return {name: piece.stored for name, piece in pieces.items() if not isinstance(piece.stored, StoredCodes)}


def make_cutter(
    config: Any,
    whole: PreTrainedModel,
    layers: Sequence[DecoderLayer],
    heads: Sequence[RankHeads],
    ranks: Ranks,
    experts: ExpertShare | None = None,
) -> Cutter:
    """Return what cuts the tensors of a checkpoint for one rank; see ``load_share``."""
    check_plan(config)
    names = {id(module): name.rsplit(".", 1)[-1] for name, module in whole.named_modules()}
    table, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    vocabulary = [path.rsplit(".", 1)[-1] for path in token_tables(whole)]
    if head is not None:
        vocabulary.append(names[id(head)])
    text = config.get_text_config()
    recurrent = recurrent_layers(whole)
    cuts = mixer_cuts(recurrent, text.hidden_size, ranks)
    paths = {id(module): path for path, module in whole.named_modules()}
    name = type(whole).__name__
    mixers = {number_of(name, paths[id(each.module)]): cut for each, cut in zip(recurrent, cuts)}
    return Cutter(
        text.base_model_tp_plan,
        names[id(layers[0].attention)],
        heads,
        [head_sizes(layer) for layer in layers],
        vocabulary,
        table.get_parameter("weight").shape,
        ranks,
        others=_beside(whole, layers[0]) - set(vocabulary),
        experts=experts,
        is_transposed=any(getattr(module, "is_transposed", False) for module in whole.modules()),
        is_interleaved=not all(getattr(module, "is_concatenated", True) for module in whole.modules()),
        numbers=[layer.number for layer in layers],
        mixers=mixers,
    )


def _beside(whole: PreTrainedModel, layer: DecoderLayer) -> set[str]:
    """The names of modules on the way to the decoder layers that do not lead there."""
    paths = {id(module): path for path, module in whole.named_modules()}
    module: nn.Module = whole
    beside: set[str] = set()
    for name in paths[id(layer.module)].split(".")[:-1]:
        beside.update(other for other, _ in module.named_children() if other != name)
        module = module.get_submodule(name)
    return beside


@dataclass(frozen=True)
class Piece:
    """A rank's shard of a tensor of a checkpoint, read lazily by ``[...]``.

    So it is not in memory twice: transformers merges experts into one tensor, and frees each one.

    Attributes:
        stored: the whole tensor.
        cut: of the rank; None for all of it.
        is_zero: whether another rank has its values.
    """

    stored: StoredTensor | StoredCodes
    cut: Cut | None
    is_zero: bool

    @property
    def is_padded(self) -> bool:
        """Whether the shard may go beyond the end of the tensor."""
        return self.cut is not None and self.cut.is_padded

    @property
    def part(self) -> tuple[int, torch.Tensor] | None:
        """The dimension that is cut, and the indices of the shard in it."""
        if self.cut is None:
            return None
        return self.cut.dim, torch.cat([torch.arange(*span) for span in self.cut.spans])

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.stored[...] if self.cut is None else self.cut.of(self.stored.source())
        read: torch.Tensor = torch.zeros_like(part) if self.is_zero else part
        return read[index]


def _parts_of(
    joined: Mapping[str, Sequence[str]], tensors: Mapping[str, StoredTensor]
) -> dict[str, tuple[str, int, int]]:
    """Return the tensor that each part is joined into: its name, where the part begins, and all rows."""
    found = {}
    for whole, ends in joined.items():
        paths = [key.removesuffix(ends[0]) for key in tensors if key.endswith(ends[0])]
        for path in (each for each in paths if all(each + end in tensors for end in ends)):
            sizes = [tensors[path + end].shape[0] for end in ends]
            for number, end in enumerate(ends):
                found[path + end] = path + whole, sum(sizes[:number]), sum(sizes)
    return found


def read_share(
    path: str | Path,
    whole: nn.Module,
    cutter: Cutter,
    ranks: Ranks,
    dtype: torch.dtype = torch.float32,
    joined: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Piece]:
    """Return the shards of a checkpoint for a rank, by name; none is read yet.

    Args:
        whole: the whole model on ``meta``. Files may have other names, which are not compared then.
        dtype: of weights that are dequantised, whole, before they are cut.
        joined: see ``joined_parts``.

    Raises:
        ValueError: a file is damaged, or a tensor has another shape than the model's or cannot be cut, or
            quantised weights are not what the configuration says of them.
    """
    state: dict[str, Piece] = {}
    expected = {name: list(tensor.shape) for name, tensor in whole.state_dict().items()}
    tensors = stored_tensors(path, dtype)
    parts = _parts_of(joined or {}, tensors)
    for key, stored in tensors.items():
        if (name := cutter.name(key)) is None:
            continue
        shape = list(stored.shape)
        if shape != expected.get(key, shape):
            raise ValueError(
                f"the weights in {path} do not fit the configuration: expected {key} of shape "
                f"{expected[key]}, got {shape}"
            )
        if key in parts:
            name_of_whole, begin, size = parts[key]
            cut = cutter.cut(name_of_whole, [size, *shape[1:]])
            cut = None if cut is None else cut.within(begin, shape[0])
        else:
            cut = cutter.cut(key, shape)
        if cut is not None:
            cut.check(shape)
        state[name] = Piece(stored, cut, ranks.rank > 0 and cutter.is_added_once(key))
    return state
