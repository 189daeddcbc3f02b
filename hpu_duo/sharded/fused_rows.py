"""The order of the rows of a fused projection, read off a run with numbered rows."""

from __future__ import annotations

import copy

import torch
from torch import nn

from hpu_duo.heads.permute import FUSED_UNKNOWN
from hpu_duo.modeling.attention import Trial, attending
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.modeling.refusal import refusing
from hpu_duo.sharded.cuts import FusedRows, HeadSizes
from hpu_duo.sharded.heads import RankHeads


def head_sizes(layer: DecoderLayer) -> HeadSizes:
    """Return the sizes of a layer's heads, with the order of its fused projection.

    Families have other orders under the same name, and shapes do not tell them apart. So the projection is
    replaced by one that returns the numbers of its rows, and the attention is run on a token at position 0,
    which rotary embeddings leave as it is. What arrives as queries, keys and values are numbers of rows.

    Args:
        layer: of a model whose weights need not be there.

    Raises:
        ValueError: the order is no known one, or the attention cannot be run by itself.
    """
    call = layer.call
    sizes = HeadSizes(call.num_heads, call.num_kv_heads, call.head_dim)
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
    groups = torch.tensor(rows).view(sizes.num_kv_heads, -1, sizes.head_dim)
    q, k, v = groups[:, :-2], groups[:, -2], groups[:, -1]
    return q.flatten().tolist(), k.flatten().tolist(), v.flatten().tolist()


class _Read(Exception):
    """The end of a run whose queries, keys and values have been read."""


class _Numbers(nn.Module):
    """Returns the number of each row."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.num_rows, dtype=torch.float64).expand(*hidden.shape[:-1], -1)


class _Reader(Trial):
    """Keeps the queries, keys and values of a token, head by head."""

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
