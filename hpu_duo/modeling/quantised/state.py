"""Tensors of a checkpoint that are loaded as codes, into ``QuantisedLinear`` layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hpu_duo.modeling.quantised.checkpoint import QuantisedTensor, StoredTensor
from hpu_duo.modeling.quantised.format import FLOATS
from hpu_duo.modeling.quantised.inc import LinearScales
from hpu_duo.modeling.quantised.linear import QuantisedLinear, WeightExecution
from hpu_duo.modeling.quantised.rounding import can_round, rounded, rounded_by
from hpu_duo.modeling.quantised.weight import QuantisedWeight

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of linear layers that choose experts, which stay plain when a checkpoint is quantised."""


@dataclass(frozen=True)
class StoredCodes:
    """The quantised weight of a linear layer in a checkpoint, or a plain one that is rounded when it is read.

    Attributes:
        stored: the tensor.
        rounding: format that a plain one is rounded to, or scales that it is rounded by.
        dtype: of a rounded one before, and of scales that are computed.
        part: the dimension and the outputs or inputs of a rank's part; None for all.
        rounds_inputs: whether the weight has the rounding of its inputs, if it is known.
    """

    stored: StoredTensor
    rounding: str | LinearScales | None
    dtype: torch.dtype
    part: tuple[int, torch.Tensor] | None = None
    rounds_inputs: bool = False

    def read(self) -> QuantisedWeight:
        """Return the weight.

        Raises:
            ValueError: values that cannot be quantised, or that the encoding does not have.
        """
        if isinstance(self.stored, QuantisedTensor):
            weight = self.stored.read()
            assert isinstance(weight, QuantisedWeight), "linear layers have two dimensions"
            if self.rounds_inputs:
                scale = self.stored.read_input_scale()
                weight = replace(weight, activations=self.stored.activations, input_scale=scale)
        else:
            assert self.rounding is not None, "a plain weight is rounded to codes"
            try:
                plain = self.stored.read().to(self.dtype)
                if isinstance(self.rounding, str):
                    weight = rounded(plain, self.rounding, self.dtype)
                else:
                    weight = rounded_by(plain, self.rounding)
            except ValueError as error:
                raise ValueError(f"{error} in {self.stored.name} of {self.stored.file}") from error
        return weight if self.part is None else weight.select(*self.part)

    def source(self) -> torch.Tensor:
        """Return the plain weight of the codes."""
        return self.read().dequantised(self.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.source()[index]


def linears_of(model: nn.Module, head: nn.Module | None, is_tied: bool) -> dict[str, nn.Linear]:
    """Return the plain linear layers by the names of their weights, but a head that is the embedding table.

    Args:
        head: the output head.
        is_tied: whether its weight is that of the embedding table.
    """
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not (is_tied and module is head)
    }


def codes_in(
    state: Mapping[str, StoredTensor],
    linears: Mapping[str, nn.Linear],
    execution: WeightExecution,
    dtype: torch.dtype,
    head: nn.Module | None,
) -> dict[str, StoredCodes]:
    """Return what is loaded as codes, by the names of weights; all other tensors are loaded as plain ones.

    Args:
        state: tensors by the names of the model.
        linears: see ``linears_of``.
        dtype: of the model.
        head: the output head, which is rounded to codes by measured scales only.

    Raises:
        ValueError: a layer has no measured scales and should.
    """
    found = {}
    for name, linear in linears.items():
        stored = state.get(name)
        if isinstance(stored, QuantisedTensor):
            found[name] = StoredCodes(stored, None, dtype, rounds_inputs=execution.rounds_inputs)
        elif execution.scales is not None:
            scales = execution.scales.linear(name.removesuffix(".weight"))
            if scales is not None and stored is not None and stored.dtype in FLOATS:
                found[name] = StoredCodes(stored, scales, dtype)
        elif stored is not None and execution.rounding is not None and linear is not head:
            is_router = name.split(".")[-2] in ROUTERS
            if stored.dtype in FLOATS and can_round(stored.shape, execution.rounding) and not is_router:
                found[name] = StoredCodes(stored, execution.rounding, dtype)
    return found


def make_room(model: nn.Module, names: Mapping[str, StoredCodes]) -> None:
    """Replace linear layers by ``QuantisedLinear`` without weights, in place."""
    for parent, leaf in _places(model, names):
        setattr(parent, leaf, QuantisedLinear.like(getattr(parent, leaf)))


def fill(
    model: nn.Module, codes: Mapping[str, StoredCodes], execution: WeightExecution, dtype: torch.dtype
) -> None:
    """Read the weights one after the other; those that do not stay codes make their layers plain again.

    Args:
        dtype: of plain weights.

    Raises:
        ValueError: a weight has another shape than its layer, or see ``StoredCodes.read``.
    """
    for (parent, leaf), (name, each) in zip(_places(model, codes), codes.items(), strict=True):
        layer, stored = getattr(parent, leaf), each.read()
        if stored.shape != (layer.out_features, layer.in_features):
            raise ValueError(
                "the weights do not fit the configuration: expected "
                f"{name} of shape {[layer.out_features, layer.in_features]}, got {list(stored.shape)}"
            )
        # Inputs are separated from plain weights later.
        if execution.keeps(stored) or stored.activations is not None:
            layer.fill(stored)
        else:
            setattr(parent, leaf, layer.plain(stored, dtype))


def _places(model: nn.Module, names: Mapping[str, StoredCodes]) -> Iterator[tuple[nn.Module, str]]:
    for name in names:
        path, _, leaf = name.removesuffix(".weight").rpartition(".")
        yield model.get_submodule(path), leaf


def quantised_layers(model: nn.Module) -> dict[str, QuantisedLinear]:
    """Return the layers of a model that have codes, by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, QuantisedLinear)}
