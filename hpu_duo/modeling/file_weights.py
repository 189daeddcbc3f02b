"""Weights that still lie in the mapping of a checkpoint's file."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

_Place = tuple[int, tuple[int, ...], tuple[int, ...]]


def plain_bytes(model: nn.Module) -> int:
    """Bytes of the weights that checkpoints have, as far as the model still holds them; shared ones once."""
    return sum(x.nbytes for x in _by_place(_weights(model)).values())


def leave_files(model: nn.Module, packed_bytes: int) -> int:
    """Copy the plain weights of a packed model to memory of their own, in place; returns the bytes copied.

    A checkpoint is mapped as a whole, and one small weight that is left in it keeps all its pages, those of
    weights which have been packed among them. Nothing is copied where more is left than was packed.
    Weights that share memory share it after it.

    Args:
        packed_bytes: by which packing has reduced ``plain_bytes``.
    """
    weights = _weights(model)
    mine = _by_place(weights)
    if sum(x.nbytes for x in mine.values()) > packed_bytes:
        return 0
    copies = {place: x.detach().clone() for place, x in mine.items()}
    for tensor in weights:
        tensor.data = copies[_place(tensor)]
    return sum(copy.nbytes for copy in copies.values())


def _weights(model: nn.Module) -> list[torch.Tensor]:
    # A weight that modules share has several names.
    named = model.state_dict(keep_vars=True).values()
    return [*{id(x): x for x in named if isinstance(x, torch.Tensor)}.values()]


def _by_place(tensors: Iterable[torch.Tensor]) -> dict[_Place, torch.Tensor]:
    return {_place(x): x for x in tensors}


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
