"""The order of a fused projection is read off the attention that uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from hpu_duo.modeling.attention import NAME, attention
from hpu_duo.modeling.loading import build_without_weights
from hpu_duo.modeling.probe import DecoderLayer, read_layers
from hpu_duo.parallel.cuts import FusedRows, head_sizes
from tests.modeling.families import FAMILIES

NUM_HEADS, NUM_KV, DIM = 4, 2, 6
ORDERS = {
    "q k v": FusedRows.BY_KIND,
    "by group": FusedRows.BY_GROUP,
}


class Attention(nn.Module):
    """Attention with a fused projection, whose rows are in one of several orders."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.config = PretrainedConfig(attn_implementation=NAME)
        self.query_key_value = nn.Linear(16, (NUM_HEADS + 2 * NUM_KV) * DIM)

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Split the rows and attend."""
        kwargs.pop("position_embeddings")
        rows = self.query_key_value(hidden)[0, 0]
        heads = rows.view(-1, DIM)
        if self.order == "q k v":
            q, k, v = heads.split((NUM_HEADS, NUM_KV, NUM_KV))
        elif self.order == "by group":
            groups = rows.view(NUM_KV, -1, DIM)
            q, k, v = groups[:, :-2].flatten(0, 1), groups[:, -2], groups[:, -1]
        elif self.order == "k v q":
            k, v, q = heads.split((NUM_KV, NUM_KV, NUM_HEADS))
        else:
            q, k, v = rows.view(DIM, -1).t().split((NUM_HEADS, NUM_KV, NUM_KV))
        return attention(self, *(each[None, :, None] for each in (q, k, v)), **kwargs)[0]


def layer_of(order: str) -> DecoderLayer:
    """A layer with it, without weights."""
    like = read_layers(build_without_weights("llama", FAMILIES["llama"](), torch.float32))[0]
    with torch.device("meta"):
        module = Attention(order)
    sizes = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV, "head_dim": DIM, "value_head_dim": DIM}
    return DecoderLayer(like.module, module, type(like.call)(**{**vars(like.call), **sizes}))


@pytest.mark.parametrize("order", ORDERS)
def test_known_orders_are_told_apart(order: str) -> None:
    assert head_sizes(layer_of(order)) == (NUM_HEADS, NUM_KV, DIM, DIM, ORDERS[order])


@pytest.mark.parametrize("order", ["k v q", "by channel"])
def test_other_orders_are_refused(order: str) -> None:
    with pytest.raises(ValueError, match=r"^Attention cannot be served by several ranks: .*query_key_value"):
        head_sizes(layer_of(order))


def test_a_family_that_fuses_by_head_is_read_without_weights(tmp_path: Path) -> None:
    model = build_without_weights(tmp_path, FAMILIES["gpt_neox"](), torch.float32)
    assert {head_sizes(layer).fused_rows for layer in read_layers(model)} == {FusedRows.BY_GROUP}
    # Nothing is left behind in the model.
    assert all(isinstance(layer.attention.query_key_value, nn.Linear) for layer in read_layers(model))
