"""Names of the modules of a model whose outputs ranks sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from hpu_duo.heads.permute import KV_NORMS, QUERY_NORMS
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.sharded.cuts import Cutter
from hpu_duo.sharded.norms import NormFormula

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TABLES = "embed_tokens"
"""Beginning of the names of further tables of tokens."""


class LayerSums(NamedTuple):
    """Names in one decoder layer.

    Attributes:
        norms: norms in its attention over all heads together, and their formulas.
        children: its modules that add a summand on each rank: attention, MLP and experts.
    """

    norms: dict[str, NormFormula]
    children: tuple[str, ...]


@dataclass(frozen=True)
class Sums:
    """Names of the modules of a model at which ranks sum.

    Attributes:
        layers: of each layer.
        tables: paths of tables of tokens.
    """

    layers: tuple[LayerSums, ...]
    tables: tuple[str, ...]

    @classmethod
    def of(cls, cutter: Cutter, whole: PreTrainedModel, layers: Sequence[DecoderLayer]) -> Sums:
        """Read them off a whole model, weights apart.

        Raises:
            ValueError: a norm over all heads has a formula that ranks do not know, see ``NormFormula``.
        """
        names = {id(parameter): name for name, parameter in whole.named_parameters()}
        return cls(
            tuple(LayerSums(wide_norms(layer), _shared_children(cutter, layer, names)) for layer in layers),
            token_tables(whole),
        )


def token_tables(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the paths of the tables with a row for each token, that of the embeddings among them."""
    table = model.get_input_embeddings()
    return tuple(
        path
        for path, module in model.named_modules()
        if module is table or (isinstance(module, nn.Embedding) and path.split(".")[-1].startswith(_TABLES))
    )


def wide_norms(layer: DecoderLayer) -> dict[str, NormFormula]:
    """Return a layer's norms of queries and keys over all heads together, by their names.

    Args:
        layer: of the whole model; its weights need not be there.

    Raises:
        ValueError: one of them has a formula that ranks do not know, see ``NormFormula``.
    """
    wide = {}
    for name, norm in layer.attention.named_children():
        # Without a weight there is nothing to cut: it is a norm of each head.
        weight = getattr(norm, "weight", None) if name in (*QUERY_NORMS, *KV_NORMS) else None
        if weight is not None and weight.ndim == 1 and tuple(weight.shape) != (layer.call.head_dim,):
            wide[name] = NormFormula.of(norm)
    return wide


def _shared_children(cutter: Cutter, layer: DecoderLayer, names: dict[int, str]) -> tuple[str, ...]:
    """The children of which ranks hold parts; what each of them holds whole is the same on all."""
    return tuple(
        name
        for name, child in layer.module.named_children()
        if any(cutter.cut(names[id(each)], each.shape) is not None for each in child.parameters())
    )
