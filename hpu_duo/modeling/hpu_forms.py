"""Parts of transformers' modules that an HPU's graphs cannot run, with equal results in a form that they can.

A module whose own code does not give the results that are expected here keeps its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, wraps
from inspect import unwrap
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_SCATTER = "scatter_"
_UPDATES = "altup"
_COMPOSE = "recomposition_frequencies"
_SPARSIFY = "_gaussian_topk"
_COMPLEX = frozenset(("polar", "view_as_complex"))
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class DenseWrites(TorchFunctionMode):
    """Writes whole tensors for writes to parts, in all calls within the context.

    Those are ``x.scatter_(dim, index, number)``, by comparisons, and ``x[a:b] += y``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._whole: Any = None
        self._part: Any = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace such a call, and call any other function."""
        if func is torch.Tensor.scatter_ and not kwargs and _is_of_last(*args):
            x, _, index, number = args
            place = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
            is_written = (index.to(torch.int32)[..., None] == place).any(dim=-2)
            return x.copy_(torch.where(is_written, number, x))
        if func is torch.Tensor.add_ and not kwargs and args[0] is self._part:
            x, place = self._whole
            x.copy_(torch.cat([x[: place.start], args[0] + args[1], x[place.stop :]]))
            return args[0]
        if func is torch.Tensor.__setitem__ and args[2] is self._part:
            return None
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.__getitem__:
            x, place = args
            is_range = isinstance(place, slice) and place.step is None
            self._whole = (x, slice(*place.indices(len(x)))) if is_range else None
            self._part = result if is_range else None
        return result


def _is_of_last(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any = None) -> bool:
    return isinstance(value, float | int) and dim in (-1, x.dim() - 1)


class RealPairs(TorchFunctionMode):
    """Computes with real and imaginary parts ``[..., 2]`` for complex numbers, within the context.

    Those of ``torch.polar`` and ``torch.view_as_complex``, and products of the latter with such numbers of
    other modules.
    """

    def __init__(self) -> None:
        super().__init__()
        self._viewed: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace such a call, and call any other function."""
        if func is torch.polar and not kwargs:
            size, angle = args
            return torch.stack([size * angle.cos(), size * angle.sin()], dim=-1)
        if func is torch.view_as_complex:
            self._viewed.append(args[0])
            return args[0]
        if func is torch.view_as_real:
            return args[0]
        if func is torch.Tensor.mul and any(arg is each for arg in args for each in self._viewed):
            (a, b), (c, d) = (arg.unbind(dim=-1) for arg in args)
            return torch.stack([a * c - b * d, a * d + b * c], dim=-1)
        return func(*args, **(kwargs or {}))


def use_hpu_forms(model: nn.Module) -> int:
    """Exchange such parts in the modules of a model of text; return the number of exchanges."""
    exchanges = (_write_densely, _compute_by_pairs, _compose_text_positions, _sparsify_by_number)
    return sum(exchange(module) for module in model.modules() for exchange in exchanges)


def _write_densely(module: nn.Module) -> bool:
    """Routers of expert groups and layers of alternating updates (AltUp), for example."""
    if not hasattr(module, _UPDATES) and _SCATTER not in _names_of(type(module)):
        return False
    _run_within(module, DenseWrites)
    return True


def _compute_by_pairs(module: nn.Module) -> bool:
    """Rotary embeddings by complex numbers, and attention that multiplies with them in a function."""
    if _COMPLEX.isdisjoint(_names_of(type(module))):
        return False
    _run_within(module, RealPairs)
    return True


def _names_of(kind: type[nn.Module]) -> set[str]:
    """Names in the code of a module's ``forward``, and in that of the functions of its file that it calls."""
    forward: Any = unwrap(kind.forward)
    if not hasattr(forward, "__code__"):
        return set()
    names = forward.__code__.co_names
    codes = (getattr(forward.__globals__.get(name), "__code__", None) for name in names)
    return {*names, *(name for code in codes if code is not None for name in code.co_names)}


def _run_within(module: Any, mode: Any) -> None:
    kind: Any = type(module)
    module.__class__ = _within(kind, mode)


@cache
def _within(kind: type[nn.Module], mode: type[TorchFunctionMode]) -> type[nn.Module]:
    """Return one class for all modules of a class, so that equal layers stay of one kind."""

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with mode():
            return kind.forward(self, *args, **kwargs)

    # A served layer runs the method of its class.
    return type(kind.__name__, (kind,), {"forward": forward})


def _compose_text_positions(module: nn.Module) -> bool:
    """Rotary positions on three axes, which are written to parts of a tensor, and are equal for text."""
    code = getattr(getattr(type(module), _COMPOSE, None), "__code__", None)
    frequencies = getattr(module, "inv_freq", None)
    if code is None or code.co_argcount != 2 or not isinstance(frequencies, torch.Tensor):
        return False
    drawn = _drawn(1, 1, 3, len(frequencies)).repeat(3, 1, 1, 1)
    if not torch.equal(getattr(module, _COMPOSE)(drawn.clone()), _of_first_axis(drawn)):
        return False
    vars(module)[_COMPOSE] = _of_first_axis
    return True


def _of_first_axis(values: torch.Tensor) -> torch.Tensor:
    """Cosines or sines ``[..., 2 * D]`` of both halves of a head, from those of each axis ``[3, ..., D]``."""
    return torch.cat([values[0], values[0]], dim=-1)


def _sparsify_by_number(module: nn.Module) -> bool:
    """An MLP's threshold by the mean and deviation of its inputs, with a quantile made on the host."""
    share = getattr(module, "activation_sparsity", None)
    # Nothing is sparse at 0, and its quantile is not finite.
    if not hasattr(module, _SPARSIFY) or not isinstance(share, float) or not 0 < share < 1:
        return False
    quantile = torch.distributions.Normal(0, 1).icdf(torch.tensor(share))
    sparsify = partial(_above_quantile, {dtype: float(quantile.to(dtype)) for dtype in _DTYPES})
    drawn = _drawn(3, 64)
    for dtype in _DTYPES:
        x = drawn.to(dtype)
        if not torch.equal(getattr(module, _SPARSIFY)(x), sparsify(x)):
            return False
    vars(module)[_SPARSIFY] = sparsify
    return True


def _above_quantile(quantiles: Mapping[torch.dtype, float], x: torch.Tensor) -> torch.Tensor:
    """Excess of elements ``[..., D]`` over the quantile of a normal distribution like theirs; 0 below it."""
    deviation = x.std(dim=-1, keepdim=True, unbiased=False)
    return nn.functional.relu(x - (x.mean(dim=-1, keepdim=True) + deviation * quantiles[x.dtype]))


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))
