"""Scattered writes of transformers' modules, such as routers of expert groups, as dense ones for an HPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_SCATTER = "scatter_"


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


def without_scatters(model: nn.Module) -> int:
    """Let modules whose ``forward`` scatters numbers run it densely; return their number."""
    found = [module for module in model.modules() if _scatters(type(module))]
    for module in found:
        vars(module)["forward"] = partial(_run, module)
    return len(found)


def _scatters(kind: type) -> bool:
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    return code is not None and _SCATTER in code.co_names


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with DenseScatters():
        return type(module).forward(module, *args, **kwargs)
