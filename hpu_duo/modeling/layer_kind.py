"""Kinds of layers: those of one kind run the same code, so that one compiled function serves them all."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

# The number of a layer differs everywhere and changes nothing but where its cache lies.
_NUMBERING = {"layer_idx", "layer_id", "training"}


class LayerKind:
    """Everything about a layer that its compiled code may take for granted: structure, shapes, plain values.

    Its attention included, which ``spec`` describes: any value that says enough of it.

    Compiled layers are entered without checks, so two layers are of one kind only if nothing that
    Python code could branch on tells them apart. Hashed once, because it is looked up in every layer
    of every step.
    """

    __slots__ = ("_hash", "_parts")

    def __init__(self, layer: nn.Module, spec: Hashable) -> None:
        modules = tuple((path, *_describe(module)) for path, module in layer.named_modules())
        self._parts = (spec, modules)
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, LayerKind) and self._parts == other._parts)

    def __repr__(self) -> str:
        spec, modules = self._parts
        return f"LayerKind({modules[0][1].__name__}, {spec}, {self._hash & 0xFFFF:04x})"


def _describe(module: nn.Module) -> tuple[type, tuple[Any, ...], tuple[Any, ...]]:
    # A number of another type is another value: 1, 1.0 and True are equal and not the same to Python code.
    values = ((name, type(value), value) for name, value in _plain_values(module))
    tensors = (
        (name, isinstance(tensor, nn.Parameter), tuple(tensor.shape), tensor.dtype)
        for held in (module.named_parameters, module.named_buffers)
        for name, tensor in held(recurse=False, remove_duplicate=False)
    )
    return type(module), tuple(values), tuple(tensors)


def _plain_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(vars(module).items()):
        if not name.startswith("_") and name not in _NUMBERING and _is_plain(value):
            yield name, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)
