"""Parts of transformers' modules that an HPU's graphs cannot run, with equal results in a form that they can.

A module whose own code does not give the results that are expected here keeps its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_SCATTER = "scatter_"
_COMPOSE = "recomposition_frequencies"


class DenseScatters(TorchFunctionMode):
    """Computes ``x.scatter_(dim, index, number)`` by comparisons, in all calls within the context."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace such a call, and call any other function."""
        is_plain = func is torch.Tensor.scatter_ and not kwargs and len(args) == 4
        if not is_plain or isinstance(args[3], torch.Tensor) or args[1] not in (-1, args[0].dim() - 1):
            return func(*args, **(kwargs or {}))
        x, _, index, number = args
        place = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
        is_written = (index.to(torch.int32)[..., None] == place).any(dim=-2)
        return x.copy_(torch.where(is_written, number, x))


def use_hpu_forms(model: nn.Module) -> int:
    """Exchange such parts in the modules of a model of text; return the number of exchanges."""
    exchanges = (_scatter_densely, _compose_text_positions)
    return sum(exchange(module) for module in model.modules() for exchange in exchanges)


def _scatter_densely(module: nn.Module) -> bool:
    """Routers of expert groups, for example."""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    if code is None or _SCATTER not in code.co_names:
        return False
    vars(module)["forward"] = partial(_run, module)
    return True


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with DenseScatters():
        return type(module).forward(module, *args, **kwargs)


def _compose_text_positions(module: nn.Module) -> bool:
    """Rotary positions on three axes, which are written to parts of a tensor, and are equal for text."""
    code = getattr(getattr(type(module), _COMPOSE, None), "__code__", None)
    frequencies = getattr(module, "inv_freq", None)
    if code is None or code.co_argcount != 2 or not isinstance(frequencies, torch.Tensor):
        return False
    drawn = torch.randn(1, 1, 3, len(frequencies)).repeat(3, 1, 1, 1)
    if not torch.equal(getattr(module, _COMPOSE)(drawn.clone()), _of_first_axis(drawn)):
        return False
    vars(module)[_COMPOSE] = _of_first_axis
    return True


def _of_first_axis(values: torch.Tensor) -> torch.Tensor:
    """Cosines or sines ``[..., 2 * D]`` of both halves of a head, from those of each axis ``[3, ..., D]``."""
    return torch.cat([values[0], values[0]], dim=-1)
