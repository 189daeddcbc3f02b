"""Modules of a rank that exchange data with the others inside a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpu_duo.device.exchange import sum_over_ranks
from hpu_duo.device.ranks import Ranks
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.sharded.norms import NormFormula
from hpu_duo.sharded.sums import Sums

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SummedOverRanks(nn.Module):
    """A module whose first output is the sum of what it is on all ranks; inputs are the same on all.

    Args:
        inner: the rank's share.
        group: name of the ranks' process group.
    """

    def __init__(self, inner: nn.Module, group: str) -> None:
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        if isinstance(output, tuple):
            return sum_over_ranks(output[0], self.group), *output[1:]
        return sum_over_ranks(output, self.group)


class VocabParallelEmbedding(nn.Module):
    """Embeddings of tokens, each of which one rank holds.

    Args:
        inner: the rank's rows ``[first, first + V / ranks)``.
        first: first token of the rank.
        group: name of the ranks' process group.
    """

    def __init__(self, inner: nn.Embedding, first: int, group: str) -> None:
        super().__init__()
        self.inner, self.first, self.group = inner, first, group

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        size = self.inner.num_embeddings
        own = token_ids - self.first
        is_own = (own >= 0) & (own < size)
        rows = self.inner(torch.clamp(own, min=0, max=size - 1))
        return sum_over_ranks(torch.where(is_own[..., None], rows, torch.zeros_like(rows)), self.group)


class RMSNormOverRanks(nn.Module):
    """A root-mean-square norm over a dimension that ranks share, equally much of it each.

    Args:
        weight: the rank's share.
        formula: of the norm.
        num_ranks: number of ranks.
        group: name of their process group.
    """

    def __init__(self, weight: nn.Parameter, formula: NormFormula, num_ranks: int, group: str) -> None:
        super().__init__()
        self.weight, self.formula = weight, formula
        self.num_ranks, self.group = num_ranks, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = x.float().square().mean(dim=-1, keepdim=True)
        mean = sum_over_ranks(own, self.group) / self.num_ranks
        return self.formula.apply(x, self.weight, mean)


def connect(
    model: PreTrainedModel, layers: Sequence[DecoderLayer], sums: Sums, ranks: Ranks, group: str
) -> None:
    """Put the exchanges between ranks into a rank's share of a model, in place.

    Two sums a layer, behind the attention and behind the MLP or its experts, and one for each table of
    tokens; two more of one number a token where queries and keys have norms over all heads together. Logits
    stay the rank's own: its columns of the vocabulary.

    Args:
        sums: where ranks sum.
        group: name of the ranks' process group.
    """
    for layer, own in zip(layers, sums.layers):
        for name, formula in own.norms.items():
            weight = getattr(layer.attention, name).weight
            setattr(layer.attention, name, RMSNormOverRanks(weight, formula, ranks.size, group))
        for name in own.children:
            setattr(layer.module, name, SummedOverRanks(getattr(layer.module, name), group))
    for path in sums.tables:
        table = model.get_submodule(path)
        assert isinstance(table, nn.Embedding), "tokens are embedded by a table"
        parent, _, name = path.rpartition(".")
        first = ranks.rank * table.num_embeddings
        setattr(model.get_submodule(parent), name, VocabParallelEmbedding(table, first, group))
