"""The shard of each tensor of a checkpoint for one rank."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from hpu_duo.device.ranks import Ranks
from hpu_duo.heads.permute import FUSED_KNOWN, FUSED_UNKNOWN, KV_NORMS, OUTPUTS, QUERY_NORMS
from hpu_duo.modeling.attention import Trial, attending
from hpu_duo.modeling.probe import DecoderLayer, refusing
from hpu_duo.parallel.config import ExpertShare, RankHeads, padded_vocab, routed_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Span = tuple[int, int]

_LAYER = re.compile(r"\.(\d+)\.")
_EXPERTS = frozenset(("experts", "shared_experts", "shared_expert", "shared_mlp", "block_sparse_moe"))
"""Modules of routed experts, and of shared ones."""
_EXPANDED = "kv_b_proj"
"""Projection from a latent to the keys without position and the values of each head, side by side."""
_MLP = frozenset(("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
_EXPERT_ROWS = ("w1", "w3", "gate_proj", "up_proj")
"""Projections of experts, which a plan for experts in one tensor does not name, as the next ones."""
_EXPERT_COLUMNS = ("w2", "down_proj", "output_linear", "fc2")
_EXPERT_PACKED = ("input_linear", "gate_up_proj", "fc1")
"""Gate and up projection in one tensor."""
_BIAS = "_bias"
"""End of the name of a bias of experts in one tensor."""


class FusedRows(Enum):
    """The order of the rows of a projection to queries, keys and values."""

    BY_KIND = "all queries, all keys, all values"
    BY_GROUP = "for each key/value head its query heads, its key and its value"


class HeadSizes(NamedTuple):
    """The heads of a layer in a checkpoint.

    Attributes:
        num_heads, num_kv_heads, head_dim, value_dim: of the layer.
        fused_rows: order of its fused projection, if it has one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    fused_rows: FusedRows = FusedRows.BY_KIND

    def channels(self, heads: Sequence[int]) -> list[Span]:
        """Return the channels of heads of queries or keys, one head after the other."""
        return _of_size(heads, self.head_dim)

    def value_channels(self, heads: Sequence[int]) -> list[Span]:
        """Return the channels of heads of values or results, one head after the other."""
        return _of_size(heads, self.value_dim)

    def fused(self, own: RankHeads) -> list[Span]:
        """Return the rows of a rank's heads in the fused projection."""
        match self.fused_rows:
            case FusedRows.BY_KIND:
                width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
                begins = (0, width, width + kv_width)
                parts = (self.channels(own.query), self.channels(own.kv), self.value_channels(own.kv))
                return [(at + a, at + b) for at, part in zip(begins, parts) for a, b in part]
            case FusedRows.BY_GROUP:
                group_size, dim = self.num_heads // self.num_kv_heads, self.head_dim
                spans: list[Span] = []
                for kv in own.kv:
                    first = kv * ((group_size + 1) * dim + self.value_dim)
                    heads = [head % group_size for head in own.query if head // group_size == kv]
                    spans += [
                        (first + begin, first + end) for begin, end in self.channels([*heads, group_size])
                    ]
                    values = first + (group_size + 1) * dim
                    spans.append((values, values + self.value_dim))
                return spans


@dataclass(frozen=True)
class Cut:
    """A part of a tensor.

    Attributes:
        dim: dimension that is cut.
        spans: ``[begin, end)`` of the shard, in order.
        is_padded: what of the spans is beyond the tensor's end is zero.
    """

    dim: int
    spans: tuple[Span, ...]
    is_padded: bool = False

    def of(self, tensor: Any) -> torch.Tensor:
        """Return a copy of the part.

        Args:
            tensor: a tensor, or a slice of a safetensors file that is read by subscripts.

        Raises:
            ValueError: it ends within the part.
        """
        shape = list(tensor.shape if isinstance(tensor, torch.Tensor) else tensor.get_shape())
        self.check(shape)
        size = shape[self.dim]
        parts = []
        for begin, end in self.spans:
            kept = slice(min(begin, size), min(end, size))
            part = tensor[(*(slice(None),) * self.dim, kept)]
            missing = (end - begin) - part.shape[self.dim]
            parts.append(part)
            if missing:
                parts.append(part.new_zeros(*shape[: self.dim], missing, *shape[self.dim + 1 :]))
        return torch.cat(parts, dim=self.dim) if len(parts) > 1 else parts[0].clone()

    def within(self, begin: int, size: int) -> Cut:
        """Return the cut of a tensor of ``size`` that is at ``begin`` in the dimension that is cut."""
        spans = ((max(a - begin, 0), min(b - begin, size)) for a, b in self.spans)
        return Cut(self.dim, tuple((a, b) for a, b in spans if a < b))

    def check(self, shape: Sequence[int]) -> None:
        """Raise ValueError if a tensor of a shape ends within the part."""
        most = max(end for _, end in self.spans)
        if most > shape[self.dim] and not self.is_padded:
            raise ValueError(
                f"expected {most} or more in dimension {self.dim}, got a tensor of {list(shape)}"
            )


def merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Join spans where one begins at the end of the one before."""
    joined: list[Span] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return tuple(joined)


class MixerCuts(NamedTuple):
    """Cuts of a module with states.

    Attributes:
        name: of the module in its layer.
        cuts: of its parameters and buffers, by their names in it; ranks have all of others.
        bias: name of the bias of its sum over ranks.
        norm: name of a norm in it over all heads together; empty if it has none.
        numbers: values of attributes in a share, by the paths of modules in it and their names.
    """

    name: str
    cuts: Mapping[str, Cut]
    bias: str
    norm: str = ""
    numbers: tuple[tuple[str, str, int], ...] = ()

    def within(self, key: str) -> str | None:
        """Return the name of a tensor in the module; None for tensors outside of it."""
        _, is_inside, name = key.partition(f".{self.name}.")
        return name if is_inside else None


class Cutter:
    """Cuts the tensors of a checkpoint by their names.

    Args:
        plan: transformers' styles by the names of parameters; see ``check_plan``.
        attention: name of the attention module in a decoder layer.
        heads: the rank's heads of each layer that attends.
        sizes: of the checkpoint's heads of each of them.
        vocabulary: names of the modules whose rows are tokens, such as ``lm_head``.
        table: shape of the table of tokens. Files may have a head by another name than the model.
        ranks: this rank among all.
        others: names of the modules besides the decoder layers, such as a vision tower, which are not
            sharded.
        experts: whole experts of the rank; None = a part of the width of each.
        is_transposed: whether experts in one tensor are ``[experts, in, out]``, not ``[experts, out, in]``.
        is_interleaved: whether gate and up projection of experts in one tensor take turns, row by row, not
            one after the other.
        numbers: of the layers that attend, among all; None = all layers do.
        mixers: cuts of the modules with states, by the numbers of their layers.
    """

    def __init__(
        self,
        plan: Mapping[str, str],
        attention: str,
        heads: Sequence[RankHeads],
        sizes: Sequence[HeadSizes],
        vocabulary: Sequence[str],
        table: Sequence[int],
        ranks: Ranks,
        *,
        others: Collection[str] = (),
        experts: ExpertShare | None = None,
        is_transposed: bool = False,
        is_interleaved: bool = False,
        numbers: Sequence[int] | None = None,
        mixers: Mapping[int, MixerCuts] | None = None,
    ) -> None:
        self.experts = experts
        self._attention, self._ranks = attention, ranks
        places = range(len(heads)) if numbers is None else numbers
        self._heads = {number: (own, of) for number, own, of in zip(places, heads, sizes, strict=True)}
        self.mixers = {} if mixers is None else dict(mixers)
        self._num_layers = 1 + max((*self._heads, *self.mixers))
        self._vocabulary, self._table = vocabulary, tuple(table)
        self._style = {name.rsplit(".", 1)[-1]: style for name, style in plan.items()}
        self._others, self._is_transposed = frozenset(others), is_transposed
        self._is_interleaved = is_interleaved

    def cut(self, key: str, shape: Sequence[int]) -> Cut | None:
        """Return the shard of a tensor; None for all of it.

        Args:
            key: its name in the checkpoint.
            shape: its whole shape.

        Raises:
            ValueError: ranks cannot share a width evenly.
        """
        path, is_bias = _path_of(key)
        leaf, layer = path[-1], _LAYER.search(key)
        if self._is_beside(key, layer):
            return None
        if layer is None or int(layer[1]) >= self._num_layers:
            return self._of_tokens(leaf, shape)
        mixer, inner = self._mixer(key, layer)
        if mixer is not None:
            return mixer.cuts.get(inner)
        if self._attention in path and int(layer[1]) in self._heads:
            return self._of_heads(leaf, is_bias, shape, *self._heads[int(layer[1])])
        if self.experts is not None and self.experts.are_in(path, shape):
            span = self.experts.span(path, shape)
            return None if span is None else Cut(0, (span,))
        is_expert = _is_expert(path)
        if is_expert or leaf in self._style:
            return self._of_width(leaf, is_bias, shape, is_expert=is_expert)
        return None

    def cut_shape(self, key: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the part."""
        size, cut = list(shape), self.cut(key, shape)
        if cut is not None:
            size[cut.dim] = sum(end - begin for begin, end in cut.spans)
        return tuple(size)

    def name(self, key: str) -> str | None:
        """Return the name in the rank's share of a checkpoint's tensor; None if the rank has none."""
        return key if self.experts is None else self.experts.name(key)

    def is_added_once(self, key: str) -> bool:
        """Whether a bias is of a sum over ranks, so that one rank alone may add it."""
        (path, is_bias), layer = _path_of(key), _LAYER.search(key)
        if not is_bias or layer is None or self._is_beside(key, layer):
            return False
        mixer, inner = self._mixer(key, layer)
        if mixer is not None:
            return inner == mixer.bias
        if self._attention in path and int(layer[1]) in self._heads:
            return path[-1] in OUTPUTS
        if self.experts is not None and self.experts.are_in(path, ()):
            return False
        return self._is_columns(path[-1], _is_expert(path))

    def is_of_states(self, key: str) -> bool:
        """Whether a tensor is of a module with states."""
        layer = _LAYER.search(key)
        return layer is not None and self._mixer(key, layer)[0] is not None

    def _mixer(self, key: str, layer: re.Match[str]) -> tuple[MixerCuts | None, str]:
        """The module with states that has a tensor, and the name of the tensor in it."""
        mixer = self.mixers.get(int(layer[1]))
        inner = None if mixer is None else mixer.within(key)
        return (None, "") if inner is None else (mixer, inner)

    def _is_beside(self, key: str, layer: re.Match[str] | None) -> bool:
        before = key if layer is None else key[: layer.start()]
        return not self._others.isdisjoint(before.split("."))

    def _of_tokens(self, leaf: str, shape: Sequence[int]) -> Cut | None:
        if not shape or (leaf not in self._vocabulary and tuple(shape) != self._table):
            return None
        size = padded_vocab(shape[0], self._ranks.size)
        return Cut(0, ((self._ranks.rank * size, (self._ranks.rank + 1) * size),), is_padded=True)

    def _of_heads(
        self, leaf: str, is_bias: bool, shape: Sequence[int], heads: RankHeads, sizes: HeadSizes
    ) -> Cut | None:
        if leaf in OUTPUTS:
            return None if is_bias else Cut(1, merged(sizes.value_channels(heads.query)))
        if leaf == "k_proj":
            return Cut(0, merged(sizes.channels(heads.kv)))
        if leaf == "v_proj":
            return Cut(0, merged(sizes.value_channels(heads.kv)))
        if leaf == _EXPANDED:
            return Cut(0, merged(_of_size(heads.kv, shape[0] // sizes.num_kv_heads)))
        if leaf in (FUSED_KNOWN, *FUSED_UNKNOWN):
            return Cut(0, merged(sizes.fused(heads)))
        if leaf in (*QUERY_NORMS, *KV_NORMS):
            return _of_norm(shape, heads.query if leaf in QUERY_NORMS else heads.kv, sizes)
        # Queries, gates, and sink logits or biases of gates: a row for each channel or head.
        match shape[0] if shape else 0:
            case rows if leaf == "q_proj":
                # Some families have a gate behind each head's queries.
                return Cut(0, merged(_of_size(heads.query, rows // sizes.num_heads)))
            case rows if rows == sizes.num_heads * sizes.head_dim:
                return Cut(0, merged(sizes.channels(heads.query)))
            case rows if rows == sizes.num_heads * sizes.value_dim:
                return Cut(0, merged(sizes.value_channels(heads.query)))
            case sizes.num_heads:
                return Cut(0, merged(_single(heads.query)))
        return None

    def _of_width(self, leaf: str, is_bias: bool, shape: Sequence[int], *, is_expert: bool) -> Cut | None:
        first = second = len(shape) - 1
        if not is_bias:
            # Experts in one tensor are [experts, out, in], in few families [experts, in, out].
            is_turned = is_expert and len(shape) == 3 and self._is_transposed
            first, second = (first, first - 1) if is_turned else (first - 1, first)
        if self._is_columns(leaf, is_expert):
            return None if is_bias else Cut(second, self._even(shape[second]))
        style = self._style.get(leaf, "")
        is_packed = leaf == "gate_up_proj" or (is_expert and leaf in _EXPERT_PACKED)
        if is_packed or style == "packed_colwise":
            half = shape[first] // 2
            (begin, end) = self._even(half)[0]
            if is_expert and self._is_interleaved:
                return Cut(first, ((2 * begin, 2 * end),))
            return Cut(first, merged([(begin, end), (half + begin, half + end)]))
        if style.startswith("colwise") or (is_expert and leaf in _EXPERT_ROWS):
            return Cut(first, self._even(shape[first]))
        return None

    def _is_columns(self, leaf: str, is_expert: bool) -> bool:
        return self._style.get(leaf, "").startswith("rowwise") or (is_expert and leaf in _EXPERT_COLUMNS)

    def _even(self, width: int) -> tuple[Span, ...]:
        size, rest = divmod(width, self._ranks.size)
        if rest:
            raise ValueError(f"expected a width that {self._ranks.size} ranks share evenly, got {width}")
        return ((self._ranks.rank * size, (self._ranks.rank + 1) * size),)


def _path_of(key: str) -> tuple[list[str], bool]:
    """The modules and the projection of a tensor by its name, and whether it is a bias.

    Biases of experts in one tensor are ``down_proj_bias``, beside ``down_proj``.
    """
    path = key.removesuffix(".weight").removesuffix(".bias").split(".")
    leaf = path[-1].removesuffix(_BIAS)
    if leaf != path[-1] and leaf in (*_EXPERT_PACKED, *_EXPERT_ROWS, *_EXPERT_COLUMNS):
        return [*path[:-1], leaf], True
    return path, key.endswith(".bias")


def _is_expert(path: Sequence[str]) -> bool:
    """Whether a projection is of experts, or of an MLP by the usual names, which not every plan has."""
    return path[-1] in _MLP or not _EXPERTS.isdisjoint(path)


def _of_norm(shape: Sequence[int], heads: Sequence[int], sizes: HeadSizes) -> Cut | None:
    if tuple(shape) in ((sizes.head_dim,), (sizes.value_dim,)):
        return None
    # One row for each head, or all heads one after the other.
    return Cut(0, merged(_single(heads) if len(shape) == 2 else sizes.channels(heads)))


def _single(heads: Sequence[int]) -> list[Span]:
    return _of_size(heads, 1)


def _of_size(heads: Sequence[int], size: int) -> list[Span]:
    """The rows of heads of a size, one head after the other."""
    return [(head * size, (head + 1) * size) for head in heads]


def head_sizes(layer: DecoderLayer) -> HeadSizes:
    """Return the sizes of a layer's heads, with the order of its fused projection.

    Families have different orders under the same name, with the same shapes. So the projection is replaced by
    one that returns the numbers of its rows, and the attention is run on a token at position 0, which rotary
    embeddings leave as it is. What arrives as queries, keys and values are numbers of rows.

    Args:
        layer: of a model, possibly without weights.

    Raises:
        ValueError: the order is no known one, or the attention cannot be run by itself.
    """
    call = layer.call
    sizes = HeadSizes(call.num_heads, call.num_kv_heads, call.head_dim, call.value_head_dim)
    names = [name for name, _ in layer.attention.named_children() if name in FUSED_UNKNOWN]
    if not names:
        return sizes
    seen = _numbered(layer, names[0])
    for order in FusedRows:
        found = sizes._replace(fused_rows=order)
        if seen == _expected(found):
            return found
    raise ValueError(
        f"{type(layer.attention).__name__} cannot be served by several ranks: expected rows of {names[0]} in "
        f"one of the orders {', '.join(repr(order.value) for order in FusedRows)}, got another one"
    )


def _expected(sizes: HeadSizes) -> tuple[list[int], list[int], list[int]]:
    """The rows of all query heads, all keys and all values."""
    every = RankHeads(tuple(range(sizes.num_kv_heads)), tuple(range(sizes.num_heads)))
    rows = [row for begin, end in sizes.fused(every) for row in range(begin, end)]
    width, kv_width = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    if sizes.fused_rows is FusedRows.BY_KIND:
        return rows[:width], rows[width : width + kv_width], rows[width + kv_width :]
    groups, dims = torch.tensor(rows).view(sizes.num_kv_heads, -1), (sizes.head_dim, sizes.value_dim)
    q, k, v = groups.split([groups.shape[1] - sum(dims), *dims], dim=1)
    return q.flatten().tolist(), k.flatten().tolist(), v.flatten().tolist()


class _Read(Exception):
    """Raised to end a run after its queries, keys and values are read."""


class _Numbers(nn.Module):
    """Returns the number of each row."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.num_rows, dtype=torch.float64).expand(*hidden.shape[:-1], -1)


class _Reader(Trial):
    """Stores the queries, keys and values of a token, head by head."""

    def __init__(self) -> None:
        self.seen: tuple[list[int], ...] = ()

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        self.seen = tuple(each.flatten().long().tolist() for each in (q, k, v))
        # The output projection has no weights.
        raise _Read


@torch.inference_mode()
def _numbered(layer: DecoderLayer, name: str) -> tuple[list[int], ...]:
    """The rows of a layer's fused projection that become queries, keys and values."""
    attention = copy.deepcopy(layer.attention)
    fused = attention.get_submodule(name)
    assert isinstance(fused, nn.Linear), "projections are linear"
    setattr(attention, name, _Numbers(fused.out_features))
    reader, angles = _Reader(), torch.zeros(1, 1, layer.call.head_dim)
    try:
        with refusing(attention), attending(attention, reader):
            attention(
                torch.zeros(1, 1, fused.in_features),
                attention_mask=None,
                position_embeddings=(angles.cos(), angles.sin()),
            )
    except _Read:
        pass
    return reader.seen


_OF_ONE_HEAD = ("head_dim", "head_size", "rotary_ndims", "scaling")
"""Attributes of attention modules that are of one head; families may derive them from the number of heads."""


def _shapes_with_states(
    cutter: Cutter, whole: PreTrainedModel, narrow: nn.Module
) -> list[tuple[str, tuple[int, ...]]]:
    """Shapes of parameters of layers in models with states where those of a narrowed model are others."""
    if not cutter.mixers:
        return []
    expected = {name: tuple(parameter.shape) for name, parameter in narrow.named_parameters()}
    found = ((name, cutter.cut(name, each.shape), each) for name, each in whole.named_parameters())
    shapes = {
        name: cutter.cut_shape(name, each.shape)
        for name, cut, each in found
        if _LAYER.search(name) and (cut is not None or cutter.is_of_states(name))
    }
    return [(name, shape) for name, shape in shapes.items() if shape != expected.get(name, shape)]


@dataclass(frozen=True)
class Fit:
    """Sizes of modules of a shard that a narrowed configuration does not determine.

    Families derive some sizes of attention from the hidden size, which ranks do not share: the size of a
    head, an output projection, a norm over all heads together. Routed experts may be whole, and fewer.

    Attributes:
        shapes: of parameters, by their names in the model.
        numbers: values of attributes, by the names of module and attribute.
        pad_token_id: of the whole model's configuration; few families read it in a step, for images.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    numbers: tuple[tuple[str, str, Any], ...]
    pad_token_id: int | None

    @classmethod
    def of(
        cls, cutter: Cutter, whole: PreTrainedModel, layers: Sequence[DecoderLayer], narrow: nn.Module
    ) -> Fit:
        """Compare the modules of a whole model with those of a narrowed configuration.

        Projections and norms over all heads get the shapes of their slices, and so do the experts of a rank.
        What else differs is left.

        Args:
            whole, narrow: both without weights.
            layers: of the whole model.
        """
        paths = {id(module): path for path, module in whole.named_modules()}
        shapes = _shapes_with_states(cutter, whole, narrow)
        numbers: list[tuple[str, str, Any]] = []
        for layer in layers:
            path = paths[id(layer.attention)]
            share = narrow.get_submodule(path)
            for name, module in layer.attention.named_children():
                if not isinstance(module, nn.Linear) and name not in (*QUERY_NORMS, *KV_NORMS):
                    continue
                for leaf, parameter in module.named_parameters(recurse=False):
                    key = f"{path}.{name}.{leaf}"
                    shape = cutter.cut_shape(key, parameter.shape)
                    if shape != tuple(share.get_parameter(f"{name}.{leaf}").shape):
                        shapes.append((key, shape))
            for name in _OF_ONE_HEAD:
                value = getattr(layer.attention, name, None)
                if value is not None and getattr(share, name, value) != value:
                    numbers.append((path, name, value))
        for path, module in whole.named_modules():
            number = path.rpartition(".")[2]
            mixer = cutter.mixers.get(int(number)) if number.isdigit() else None
            if mixer is not None and hasattr(module, mixer.name):
                within = f"{path}.{mixer.name}"
                numbers += [
                    (f"{within}.{part}".rstrip("."), name, size) for part, name, size in mixer.numbers
                ]
        if cutter.experts is not None:
            for path, module in routed_experts(whole):
                names = {f"{path}.{leaf}": leaf for leaf, _ in module.named_parameters(recurse=False)}
                shapes += [
                    (key, cutter.cut_shape(key, module.get_parameter(names[key]).shape)) for key in names
                ]
                numbers += [(path, name, value) for name, value in cutter.experts.numbers]
        return cls(tuple(shapes), tuple(numbers), whole.config.get_text_config().pad_token_id)

    def apply(self, model: PreTrainedModel) -> None:
        """Set these sizes in a model of the narrowed configuration, in place; weights are uninitialized."""
        for key, shape in self.shapes:
            path, _, leaf = key.rpartition(".")
            module = model.get_submodule(path)
            old = module.get_parameter(leaf)
            new = torch.empty(shape, dtype=old.dtype, device=old.device)
            setattr(module, leaf, nn.Parameter(new, requires_grad=old.requires_grad))
            if isinstance(module, nn.Linear) and leaf == "weight":
                module.out_features, module.in_features = shape
        for path, name, value in self.numbers:
            setattr(model.get_submodule(path), name, value)
        model.config.get_text_config().pad_token_id = self.pad_token_id
