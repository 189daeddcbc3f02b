"""Put a model's tensors elsewhere where ``module.to`` cannot, because it would lose their kind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def replace_tensors(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put other tensors in place of a model's parameters and buffers; shared ones stay shared.

    Args:
        make: gives the new tensor for an old one, or the old one, which then stays; called once for each.
    """
    # With the old tensors, whose identity none of the new ones may take.
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
