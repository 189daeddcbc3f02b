"""Trial of what ranks add: their shares of a module, run one by one, sum up to what the module computes.

Weights are neither needed nor made: the matrix of a linear layer becomes the product of two narrow random
ones, which are cut as the matrix is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpu_duo.modeling.attention import Trial, attending
from hpu_duo.modeling.layer_kind import LayerKind
from hpu_duo.modeling.probe import DecoderLayer, read_layers
from hpu_duo.modeling.refusal import refusing
from hpu_duo.sharded.cuts import Cutter
from hpu_duo.sharded.heads import RankHeads
from hpu_duo.sharded.norms import NormFormula
from hpu_duo.sharded.sums import Sums

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOLERANCE = 1e-3
"""Of the largest value. What is counted twice, or normed apart, is off by a good part of that value."""
_RANK = 4
_RAMP = (0.5, 2.0)
"""Sizes of the first and the last row of a matrix, so that what ranks compute is not of one size."""


def check_summands(
    family: str, whole: PreTrainedModel, layers: Sequence[DecoderLayer], sums: Sums, shares: Sequence[Share]
) -> None:
    """Check that ranks add up to what the whole model computes, at each module that they sum.

    One module of each kind is tried: attention, and MLPs of linear layers. Routed experts are not.

    Args:
        family: for error messages.
        whole: the whole model on ``meta``.
        layers: its layers.
        sums: where ranks sum.
        shares: of all ranks.

    Raises:
        ValueError: they add up to something else; the message names family and module.
    """
    paths = {id(module): path for path, module in whole.named_modules()}
    modules = [
        _Module(paths[id(child)], child, number, layer, own.norms if child is layer.attention else {})
        for number, (layer, own) in enumerate(zip(layers, sums.layers))
        for child in (layer.module.get_submodule(name) for name in own.children)
    ]
    calls = _calls(whole, [each.module for each in modules])
    tried: set[LayerKind] = set()
    for each in modules:
        # A module that no step calls adds nothing.
        call = calls.get(id(each.module))
        if call is None or each.kind in tried or not each.can_be_tried:
            continue
        tried.add(each.kind)
        error = each.error(call, shares)
        # Also of a result that is not a number.
        if not error < _TOLERANCE:
            raise ValueError(
                f"{family!r} cannot be served by several ranks: expected what {len(shares)} ranks make of "
                f"{each.path} to add up to what it computes, got a difference of {error:.0%} of the largest "
                "value in a trial"
            )


@dataclass(frozen=True)
class Share:
    """One rank's share of a model.

    Attributes:
        rank: its number.
        model: on ``meta``; shares of all ranks have the same shapes.
        heads: of each layer.
        cutter: of tensors.
    """

    rank: int
    model: PreTrainedModel
    heads: Sequence[RankHeads]
    cutter: Cutter


@dataclass(frozen=True)
class _Call:
    """The arguments of a module's forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def filled(self, generator: torch.Generator) -> _Call:
        """The same with values in place of tensors on ``meta``."""
        return _Call(*(_filled(each, generator) for each in (self.args, self.kwargs)))

    def of_heads(self, heads: Sequence[int], num_heads: int) -> _Call:
        """The same with those heads of keys and values ``[1, heads, Q, D]`` that come from another layer."""

        def cut(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.ndim == 4 and value.shape[1] == num_heads > 1:
                return value[:, list(heads)]
            return value

        return replace(self, kwargs=_mapped(cut, self.kwargs))

    def run(self, module: nn.Module) -> torch.Tensor:
        """Run a module; returns its first output."""
        # Some attention modules write their keys and values into what they are given.
        with attending(module, _PerHead()):
            output = module(*self.args, **_mapped(lambda each: each, self.kwargs))
        first: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return first


def _mapped(change: Any, value: Any) -> Any:
    """Change what lies in tuples, lists and dictionaries; these are copied."""
    if isinstance(value, dict):
        return {name: _mapped(change, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(change, each) for each in value)
    return change(value)


def _filled(value: Any, generator: torch.Generator) -> Any:
    def fill(each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or not each.is_meta:
            return each
        if each.is_floating_point() or each.is_complex():
            dtype = torch.float32 if each.is_floating_point() else torch.complex64
            return torch.randn(each.shape, generator=generator, dtype=dtype)
        return torch.ones(each.shape, dtype=each.dtype)

    return _mapped(fill, value)


@torch.inference_mode()
def _calls(model: PreTrainedModel, modules: Sequence[nn.Module]) -> dict[int, _Call]:
    """The first call of each module in a run of the model, by the module's id."""
    calls: dict[int, _Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(id(module), _Call(*_mapped(lambda each: each, (args, kwargs))))

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        read_layers(model)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer; others may compute anything."""
    return type(module) is nn.Linear


class _PerHead(Trial):
    """A function of queries, keys and values that each head computes by itself, as attention does."""

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        group_size = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(group_size, dim=1) for each in (k, v))
        mixed = q + 2 * k + 3 * v
        if sinks is not None:
            mixed = mixed + sinks.view(1, -1, 1, 1)
        return mixed.transpose(1, 2).contiguous()


class _Product(nn.Module):
    """A linear layer whose matrix is a product, ``outer[out, r] @ inner[in, r].T``."""

    def __init__(self, outer: torch.Tensor, inner: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.outer, self.inner, self.bias = outer, inner, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = x @ self.inner @ self.outer.T
        return product if self.bias is None else product + self.bias


class _NormAsOfAll(nn.Module):
    """A norm over a dimension of which a rank has a part; the mean square is that of the whole."""

    def __init__(self, weight: torch.Tensor, formula: NormFormula, mean: torch.Tensor) -> None:
        super().__init__()
        self.held, self.formula, self.mean = weight, formula, mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula.apply(x, self.held, self.mean)


_Values = Mapping[str, tuple[torch.Tensor, ...]]
"""Values of parameters by name: two factors of the matrix of a linear layer, or the parameter itself."""


@dataclass(frozen=True)
class _Module:
    """A module of the whole model whose outputs ranks sum.

    Attributes:
        path: its name.
        module: on ``meta``.
        number: of its layer.
        layer: that has it.
        norms: over all heads together in it.
    """

    path: str
    module: nn.Module
    number: int
    layer: DecoderLayer
    norms: Mapping[str, NormFormula]

    @property
    def kind(self) -> LayerKind:
        """The kind: modules of one kind run the same code."""
        return LayerKind(self.module, (self.layer.call.num_heads, self.layer.call.num_kv_heads))

    @property
    def can_be_tried(self) -> bool:
        """Whether all its matrices are of linear layers, and none of experts that are chosen."""
        if self.module is self.layer.attention:
            return True
        matrices = sum(each.ndim > 1 for each in self.module.parameters())
        parts = list(self.module.modules())
        has_list = any(isinstance(each, nn.ModuleList) for each in parts)
        return matrices == sum(map(_is_linear, parts)) and not has_list

    @torch.inference_mode()
    def error(self, call: _Call, shares: Sequence[Share]) -> float:
        """The largest difference of the sum of the shares, in parts of the module's largest value."""
        generator = torch.Generator().manual_seed(0)
        call = call.filled(generator)
        values = self._drawn(generator)
        buffers = {name: _filled(each, generator) for name, each in self.module.named_buffers()}
        whole = _with_values(self.module, values, buffers)
        means: dict[str, torch.Tensor] = {}
        for name in self.norms:
            whole.get_submodule(name).register_forward_pre_hook(_keep_mean(means, name))
        with refusing(self.module):
            expected = call.run(whole)
            parts = [self._of_rank(share, call, values, buffers, means) for share in shares]
        if {part.shape for part in parts} != {expected.shape}:
            return math.inf
        return float((sum(parts) - expected).abs().max() / expected.abs().max())

    def _drawn(self, generator: torch.Generator) -> _Values:
        linears = {id(each.weight) for each in self.module.modules() if _is_linear(each)}
        values: dict[str, tuple[torch.Tensor, ...]] = {}
        for name, parameter in self.module.named_parameters():
            if id(parameter) in linears:
                outer, inner = (torch.randn(size, _RANK, generator=generator) for size in parameter.shape)
                values[name] = outer * torch.linspace(*_RAMP, len(outer))[:, None], inner / len(inner) ** 0.5
            else:
                values[name] = (torch.randn(parameter.shape, generator=generator),)
        return values

    def _of_rank(
        self,
        share: Share,
        call: _Call,
        values: _Values,
        buffers: Mapping[str, torch.Tensor],
        means: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        own = {name: self._cut(share, name, each) for name, each in values.items()}
        module = _with_values(share.model.get_submodule(self.path), own, buffers)
        for name, formula in self.norms.items():
            [weight] = own[f"{name}.weight"]
            setattr(module, name, _NormAsOfAll(weight, formula, means[name]))
        heads = share.heads[self.number].kv
        return call.of_heads(heads, self.layer.call.num_kv_heads).run(module)

    def _cut(self, share: Share, name: str, value: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        key = f"{self.path}.{name}"
        if share.rank and share.cutter.is_added_once(key):
            value = tuple(torch.zeros_like(each) for each in value)
        is_matrix = len(value) == 2
        cut = share.cutter.cut(key, [len(each) for each in value] if is_matrix else value[0].shape)
        if cut is None:
            return value
        if not is_matrix:
            return (cut.of(value[0]),)
        rows = replace(cut, dim=0)
        return tuple(rows.of(each) if dim == cut.dim else each for dim, each in enumerate(value))


def _keep_mean(means: dict[str, torch.Tensor], name: str) -> Any:
    def keep(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        means[name] = args[0].float().square().mean(dim=-1, keepdim=True)

    return keep


def _with_values(module: nn.Module, values: _Values, buffers: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy of a module with values in place of its parameters and buffers, on the host."""
    root = nn.Module()
    root.copied = copy.deepcopy(module)
    for name, value in values.items():
        path, _, leaf = f"copied.{name}".rpartition(".")
        if len(value) == 2:
            above, _, last = path.rpartition(".")
            bias = values.get(name.removesuffix("weight") + "bias", (None,))[0]
            setattr(root.get_submodule(above), last, _Product(*value, bias))
        elif not isinstance(owner := root.get_submodule(path), _Product):
            setattr(owner, leaf, nn.Parameter(value[0], requires_grad=False))
    for name, buffer in buffers.items():
        path, _, leaf = f"copied.{name}".rpartition(".")
        setattr(root.get_submodule(path), leaf, buffer)
    copied: nn.Module = root.copied
    return copied
