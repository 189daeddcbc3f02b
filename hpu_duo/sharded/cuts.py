"""The part of each tensor of a checkpoint that one rank holds."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from hpu_duo.device.ranks import Ranks
from hpu_duo.heads.permute import FUSED_KNOWN, FUSED_UNKNOWN, KV_NORMS, OUTPUTS, QUERY_NORMS
from hpu_duo.sharded.config import padded_vocab
from hpu_duo.sharded.experts import ExpertShare
from hpu_duo.sharded.heads import RankHeads

Span = tuple[int, int]

_LAYER = re.compile(r"\.(\d+)\.")
_EXPERTS = frozenset(("experts", "shared_experts", "shared_expert", "shared_mlp", "block_sparse_moe"))
"""Modules of routed experts, and of those that every token takes."""
_EXPANDED = "kv_b_proj"
"""Projection from a latent to the keys without position and the values of each head, side by side."""
_MLP = frozenset(("gate_proj", "up_proj", "down_proj"))
_EXPERT_ROWS = ("w1", "w3", "gate_proj", "up_proj")
"""Projections of experts, which a plan for experts in one tensor does not name, as the next ones."""
_EXPERT_COLUMNS = ("w2", "down_proj", "output_linear", "fc2")
_EXPERT_PACKED = ("input_linear", "gate_up_proj", "fc1")
"""Gate and up projection in one tensor."""


class FusedRows(Enum):
    """The order of the rows of a projection to queries, keys and values."""

    BY_KIND = "all queries, all keys, all values"
    BY_GROUP = "for each key/value head its query heads, its key and its value"


class HeadSizes(NamedTuple):
    """The heads of a layer in a checkpoint.

    Attributes:
        num_heads, num_kv_heads, head_dim: of the layer.
        fused_rows: order of its fused projection, if it has one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    fused_rows: FusedRows = FusedRows.BY_KIND

    def channels(self, heads: Sequence[int]) -> list[Span]:
        """Return the channels of heads of one kind, one head after the other."""
        return [(head * self.head_dim, (head + 1) * self.head_dim) for head in heads]

    def fused(self, own: RankHeads) -> list[Span]:
        """Return the rows of a rank's heads in the fused projection."""
        match self.fused_rows:
            case FusedRows.BY_KIND:
                width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
                begins = (0, width, width + kv_width)
                parts = (self.channels(each) for each in (own.query, own.kv, own.kv))
                return [(at + a, at + b) for at, part in zip(begins, parts) for a, b in part]
            case FusedRows.BY_GROUP:
                group_size = self.num_heads // self.num_kv_heads
                heads: list[int] = []
                for kv in own.kv:
                    first = kv * (group_size + 2)
                    heads += [first + head % group_size for head in own.query if head // group_size == kv]
                    heads += [first + group_size, first + group_size + 1]
                return self.channels(heads)


@dataclass(frozen=True)
class Cut:
    """A part of a tensor.

    Attributes:
        dim: dimension that is cut.
        spans: ``[begin, end)`` of what is kept of it, in order.
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


class Cutter:
    """Cuts the tensors of a checkpoint by their names.

    Args:
        plan: transformers' styles by the names of parameters; see ``check_plan``.
        attention: name of the attention module in a decoder layer.
        heads: the rank's heads of each layer.
        sizes: of the checkpoint's heads of each layer.
        vocabulary: names of the modules whose rows are tokens, such as ``lm_head``.
        table: shape of the table of tokens. Files may have a head by another name than the model.
        ranks: this rank among all.
        others: names of the modules beside the decoder layers, such as a tower for images, which are whole.
        experts: that the rank holds whole; None = a part of the width of each.
        is_transposed: whether experts in one tensor are ``[experts, in, out]``, not ``[experts, out, in]``.
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
    ) -> None:
        self.experts = experts
        self._attention, self._heads, self._sizes, self._ranks = attention, heads, sizes, ranks
        self._vocabulary, self._table = vocabulary, tuple(table)
        self._style = {name.rsplit(".", 1)[-1]: style for name, style in plan.items()}
        self._others, self._is_transposed = frozenset(others), is_transposed

    def cut(self, key: str, shape: Sequence[int]) -> Cut | None:
        """Return the part of a tensor that the rank holds; None for all of it.

        Args:
            key: its name in the checkpoint.
            shape: its whole shape.

        Raises:
            ValueError: ranks cannot share a width evenly.
        """
        path = key.removesuffix(".weight").removesuffix(".bias").split(".")
        leaf, is_bias = path[-1], key.endswith(".bias")
        layer = _LAYER.search(key)
        if self._is_beside(key, layer):
            return None
        if layer is None or int(layer[1]) >= len(self._heads):
            return self._of_tokens(leaf, shape)
        if self._attention in path:
            number = int(layer[1])
            return self._of_heads(leaf, is_bias, shape, self._heads[number], self._sizes[number])
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
        """Return the name in the rank's share of a checkpoint's tensor; None if it holds nothing of it."""
        return key if self.experts is None else self.experts.name(key)

    def is_added_once(self, key: str) -> bool:
        """Whether a bias is of a sum over ranks, so that one rank alone may add it."""
        path, layer = key.removesuffix(".bias").split("."), _LAYER.search(key)
        if not key.endswith(".bias") or layer is None or self._is_beside(key, layer):
            return False
        if self._attention in path:
            return path[-1] in OUTPUTS
        if self.experts is not None and self.experts.are_in(path, ()):
            return False
        return self._is_columns(path[-1], _is_expert(path))

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
        query = sizes.channels(heads.query)
        if leaf in OUTPUTS:
            return None if is_bias else Cut(1, merged(query))
        if leaf in ("k_proj", "v_proj"):
            return Cut(0, merged(sizes.channels(heads.kv)))
        if leaf == _EXPANDED:
            each = shape[0] // sizes.num_kv_heads
            return Cut(0, merged([(head * each, (head + 1) * each) for head in heads.kv]))
        if leaf in (FUSED_KNOWN, *FUSED_UNKNOWN):
            return Cut(0, merged(sizes.fused(heads)))
        if leaf in (*QUERY_NORMS, *KV_NORMS):
            return _of_norm(shape, heads.query if leaf in QUERY_NORMS else heads.kv, sizes)
        # Queries, gates, and sink logits or biases of gates: a row for each channel or head.
        match shape[0] if shape else 0:
            case rows if leaf == "q_proj" or rows == sizes.num_heads * sizes.head_dim:
                return Cut(0, merged(query))
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


def _is_expert(path: Sequence[str]) -> bool:
    """Whether a projection is of experts, or of an MLP by the usual names, which not every plan has."""
    return path[-1] in _MLP or not _EXPERTS.isdisjoint(path)


def _of_norm(shape: Sequence[int], heads: Sequence[int], sizes: HeadSizes) -> Cut | None:
    if tuple(shape) == (sizes.head_dim,):
        return None
    # One row for each head, or all heads one after the other.
    return Cut(0, merged(_single(heads) if len(shape) == 2 else sizes.channels(heads)))


def _single(heads: Sequence[int]) -> list[Span]:
    return [(head, head + 1) for head in heads]
