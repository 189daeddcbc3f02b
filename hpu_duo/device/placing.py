"""Moves a model's tensors where ``module.to`` would lose their subclass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def replace_tensors(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace a model's parameters and buffers; shared ones stay shared.

    Args:
        make: returns the new tensor for an old one, or the old one, which is not replaced then; called once
            for each.
    """
    # With references to the old tensors, so that new ones cannot have their ids.
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        held = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, old in held:
            if id(old) not in made:
                new = make(old)
                is_parameter = isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter)
                made[id(old)] = old, nn.Parameter(new, requires_grad=False) if is_parameter else new
            setattr(module, name, made[id(old)][1])
