"""The part of each tensor of a checkpoint that one rank holds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpu_duo.device.ranks import Ranks
from hpu_duo.heads.permute import FUSED_KNOWN, KV_NORMS, OUTPUTS, QUERY_NORMS
from hpu_duo.sharded.config import padded_vocab
from hpu_duo.sharded.heads import RankHeads

Span = tuple[int, int]

_LAYER = re.compile(r"\.(\d+)\.")
_EXPERTS = frozenset(("experts", "shared_experts", "shared_expert", "shared_mlp", "block_sparse_moe"))
"""Modules of routed experts, and of those that every token takes."""
_EXPERT_ROWS = ("w1", "w3", "gate_proj", "up_proj")
"""Projections of experts, which a plan for experts in one tensor does not name, as the next ones."""
_EXPERT_COLUMNS = ("w2", "down_proj", "output_linear")
_EXPERT_PACKED = ("input_linear",)
"""Gate and up projection in one tensor."""


@dataclass(frozen=True)
class Cut:
    """A part of a tensor.

    Attributes:
        dim: dimension that is cut.
        spans: ``[begin, end)`` of what is kept of it, in order; those beyond the tensor's end are zero.
    """

    dim: int
    spans: tuple[Span, ...]

    def of(self, tensor: Any) -> torch.Tensor:
        """Return a copy of the part.

        Args:
            tensor: a tensor, or a slice of a safetensors file that is read by subscripts.
        """
        shape = list(tensor.shape if isinstance(tensor, torch.Tensor) else tensor.get_shape())
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
        num_heads, num_kv_heads, head_dim: of the checkpoint.
        vocabulary: names of the modules whose rows are tokens, such as ``lm_head``.
        vocab_size: tokens.
        ranks: this rank among all.
    """

    def __init__(
        self,
        plan: Mapping[str, str],
        attention: str,
        heads: Sequence[RankHeads],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocabulary: Sequence[str],
        vocab_size: int,
        ranks: Ranks,
    ) -> None:
        self._attention, self._heads, self._ranks = attention, heads, ranks
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._style = {name.rsplit(".", 1)[-1]: style for name, style in plan.items()}

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
        if layer is None or int(layer[1]) >= len(self._heads):
            return self._of_tokens(shape) if leaf in self._vocabulary else None
        if self._attention in path:
            return self._of_heads(leaf, is_bias, shape, self._heads[int(layer[1])])
        is_expert = not _EXPERTS.isdisjoint(path)
        if is_expert or leaf in self._style:
            return self._of_width(leaf, is_bias, shape, is_expert=is_expert)
        return None

    def is_added_once(self, key: str) -> bool:
        """Whether a bias is of a sum over ranks, so that one rank alone may add it."""
        path = key.removesuffix(".bias").split(".")
        if not key.endswith(".bias") or _LAYER.search(key) is None:
            return False
        if self._attention in path:
            return path[-1] in OUTPUTS
        return self._is_columns(path[-1], not _EXPERTS.isdisjoint(path))

    def _of_tokens(self, shape: Sequence[int]) -> Cut | None:
        if not shape or shape[0] != self._vocab_size:
            return None
        size = padded_vocab(self._vocab_size, self._ranks.size)
        return Cut(0, ((self._ranks.rank * size, (self._ranks.rank + 1) * size),))

    def _of_heads(self, leaf: str, is_bias: bool, shape: Sequence[int], heads: RankHeads) -> Cut | None:
        query, kv = (self._channels(each) for each in (heads.query, heads.kv))
        if leaf in OUTPUTS:
            return None if is_bias else Cut(1, merged(query))
        if leaf == "q_proj":
            return Cut(0, merged(query))
        if leaf in ("k_proj", "v_proj"):
            return Cut(0, merged(kv))
        if leaf == FUSED_KNOWN:
            width, kv_width = self._num_heads * self._head_dim, self._num_kv_heads * self._head_dim
            begins = (0, width, width + kv_width)
            spans = [(at + a, at + b) for at, each in zip(begins, (query, kv, kv)) for a, b in each]
            return Cut(0, merged(spans))
        if leaf in (*QUERY_NORMS, *KV_NORMS):
            own = heads.query if leaf in QUERY_NORMS else heads.kv
            return self._of_norm(shape, own)
        return None

    def _of_norm(self, shape: Sequence[int], heads: Sequence[int]) -> Cut | None:
        if tuple(shape) == (self._head_dim,):
            return None
        # One row for each head, or all heads one after the other.
        return Cut(
            0, merged([(head, head + 1) for head in heads] if len(shape) == 2 else self._channels(heads))
        )

    def _of_width(self, leaf: str, is_bias: bool, shape: Sequence[int], *, is_expert: bool) -> Cut | None:
        # Experts in one tensor are [experts, out, in].
        first = len(shape) - (1 if is_bias else 2)
        if self._is_columns(leaf, is_expert):
            return None if is_bias else Cut(first + 1, self._even(shape[first + 1]))
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

    def _channels(self, heads: Sequence[int]) -> list[Span]:
        return [(head * self._head_dim, (head + 1) * self._head_dim) for head in heads]
