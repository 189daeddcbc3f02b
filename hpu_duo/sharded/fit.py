"""Sizes of a rank's share that its configuration cannot say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpu_duo.heads.permute import KV_NORMS, QUERY_NORMS
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.sharded.cuts import Cutter
from hpu_duo.sharded.experts import routed_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OF_ONE_HEAD = ("head_dim", "head_size", "rotary_ndims", "scaling")
"""Attributes of attention modules that are of one head; families may derive them from the number of heads."""


@dataclass(frozen=True)
class Fit:
    """Sizes of modules in a share that a narrowed configuration does not give them.

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

        Projections and norms over all heads get the shapes of their slices, and so do routed experts that a
        rank holds whole. What else differs is left.

        Args:
            whole, narrow: both without weights.
            layers: of the whole model.
        """
        paths = {id(module): path for path, module in whole.named_modules()}
        shapes: list[tuple[str, tuple[int, ...]]] = []
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
        if cutter.experts is not None:
            for path, module in routed_experts(whole):
                names = {f"{path}.{leaf}": leaf for leaf, _ in module.named_parameters(recurse=False)}
                shapes += [
                    (key, cutter.cut_shape(key, module.get_parameter(names[key]).shape)) for key in names
                ]
                numbers += [(path, name, value) for name, value in cutter.experts.numbers]
        return cls(tuple(shapes), tuple(numbers), whole.config.get_text_config().pad_token_id)

    def apply(self, model: PreTrainedModel) -> None:
        """Give a model of the narrowed configuration these sizes, in place; its weights are not filled."""
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
