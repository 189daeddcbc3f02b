"""Trials of a rank's shard, and errors for families with shards that are not just smaller models."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpu_duo.device.ranks import Ranks
from hpu_duo.modeling.attention import AttentionCall, LayerKind, Trial, attending
from hpu_duo.modeling.loading import build_without_weights
from hpu_duo.modeling.probe import DecoderLayer, read_layers, refusing
from hpu_duo.modeling.recurrent import recurrent_layers
from hpu_duo.parallel.config import ExpertShare, RankHeads, narrowed_config
from hpu_duo.parallel.cuts import Cutter, Fit
from hpu_duo.parallel.loading import make_cutter
from hpu_duo.parallel.mixers import NUM_TOKENS
from hpu_duo.parallel.modules import NormFormula, Sums

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOLERANCE = 1e-3
"""Of the largest value. What is counted twice, or normed apart, is off by a good part of that value."""
_RANK = 4
_RAMP = (0.5, 2.0)
"""Sizes of the first and the last row of a matrix, so that what ranks compute is not of one size."""


def check_partial_sums(
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
    mixers = {id(each.mixer) for each in recurrent_layers(whole)}
    modules = []
    for number, own in enumerate(sums.layers):
        layer = layers[number] if number < len(layers) else None
        for name in own.children:
            child = whole.get_submodule(f"{own.path}.{name}")
            within = f"{name}."
            norms = {
                path.removeprefix(within): each for path, each in own.norms.items() if path.startswith(within)
            }
            has_states = id(child) in mixers
            modules.append(_Module(f"{own.path}.{name}", child, number, layer, norms, has_states))
    calls = _calls(whole, [each.module for each in modules if not each.has_states])
    width = whole.config.get_text_config().hidden_size
    text = _Call((torch.empty(1, NUM_TOKENS, width, device="meta"),), {})
    calls |= {id(each.module): text for each in modules if each.has_states}
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
        # Some attention modules write their keys and values into their arguments.
        with attending(module, _PerHead()):
            output = module(*self.args, **_mapped(lambda each: each, self.kwargs))
        first: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return first


def _mapped(change: Any, value: Any) -> Any:
    """Map the items of tuples, lists and dictionaries, which are copied."""
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
        mixed = _of_size(q + 2 * k, v.shape[-1]) + 3 * v
        if sinks is not None:
            mixed = mixed + sinks.view(1, -1, 1, 1)
        return mixed.transpose(1, 2).contiguous()


def _of_size(x: torch.Tensor, size: int) -> torch.Tensor:
    """Vectors ``[..., D]`` as sums of their parts, ``[..., size]``, to which all of D contribute."""
    num_parts = -(-x.shape[-1] // size)
    parts = torch.constant_pad_nd(x, (0, num_parts * size - x.shape[-1])).unflatten(-1, (num_parts, size))
    weight = torch.arange(1, num_parts + 1, dtype=x.dtype, device=x.device)
    return (parts * weight[:, None]).sum(dim=-2)


class _Product(nn.Module):
    """A linear layer with a low-rank matrix, ``outer[out, r] @ inner[in, r].T``."""

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

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return self.formula.apply(x, self.held, self.mean, gate)


_Values = Mapping[str, tuple[torch.Tensor, ...]]
"""Values of parameters by name: two factors of the matrix of a linear layer, or the parameter itself."""


@dataclass(frozen=True)
class _Module:
    """A row-parallel module of the whole model.

    Attributes:
        path: its name.
        module: on ``meta``.
        number: of its layer, by which shares have heads.
        layer: that has it, if it attends.
        norms: over all heads together in it.
        has_states: whether it mixes tokens by states of rows.
    """

    path: str
    module: nn.Module
    number: int
    layer: DecoderLayer | None
    norms: Mapping[str, NormFormula]
    has_states: bool

    @property
    def kind(self) -> LayerKind:
        """The kind: modules of one kind run the same code."""
        call = None if self.layer is None else self.layer.call
        return LayerKind(self.module, None if call is None else (call.num_heads, call.num_kv_heads))

    @property
    def can_be_tried(self) -> bool:
        """Whether all its matrices are of linear layers, and none of experts that are chosen."""
        if self.has_states or (self.layer is not None and self.module is self.layer.attention):
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
        for name, formula in self.norms.items():
            whole.get_submodule(name).register_forward_pre_hook(_keep_mean(means, name, formula))
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
        if self.has_states:
            buffers = {name: self._cut(share, name, (each,))[0] for name, each in buffers.items()}
        module = _with_values(share.model.get_submodule(self.path), own, buffers)
        for name, formula in self.norms.items():
            [weight] = own[f"{name}.weight"]
            setattr(module, name, _NormAsOfAll(weight, formula, means[name]))
        if self.layer is not None:
            call = call.of_heads(share.heads[self.number].kv, self.layer.call.num_kv_heads)
        return call.run(module)

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


def _keep_mean(means: dict[str, torch.Tensor], name: str, formula: NormFormula) -> Any:
    def keep(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        means[name] = formula.mean(*args)

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


def check_share(
    path: str | Path,
    config: Any,
    dtype: torch.dtype,
    whole: PreTrainedModel,
    layers: Sequence[DecoderLayer],
    heads: Sequence[RankHeads],
    ranks: Ranks,
    experts: ExpertShare | None = None,
) -> None:
    """Check that slices of the weights are the weights of a smaller model of the family, by shapes alone.

    Args:
        path: directory of the checkpoint, for error messages.
        config: transformers' configuration of the whole model.
        whole: the whole model on ``meta``.
        layers: its layers.
        heads: the rank's heads of each layer.
        experts: whole experts of the rank; None = a part of the width of each.

    Raises:
        ValueError: transformers has no plan for the family, ranks cannot share it evenly, or something in it
            depends on the number of heads or on a width in another way. The message names family and module.
    """
    text = config.get_text_config()
    cutter = make_cutter(config, whole, layers, heads, ranks, experts)
    narrow_config = narrowed_config(config, layers[0].call.head_dim, ranks.size, experts)
    narrow = build_without_weights(path, narrow_config, dtype)
    Fit.of(cutter, whole, layers, narrow).apply(narrow)
    sums = Sums.of(cutter, whole, layers)
    _check_shapes(text.model_type, cutter, whole, narrow)
    _check_sums(text, cutter, whole, layers, sums)
    everybody = [Ranks(rank, ranks.size) for rank in range(ranks.size)]
    shares = [_share(config, whole, layers, narrow, each, experts) for each in everybody]
    check_partial_sums(text.model_type, whole, layers, sums, shares)
    for number, (layer, share) in enumerate(zip(layers, _read_by_token(text.model_type, narrow, sums))):
        _check_attention(type(whole).__name__, number, layer, share, heads[number])


def _share(
    config: Any,
    whole: PreTrainedModel,
    layers: Sequence[DecoderLayer],
    narrow: PreTrainedModel,
    ranks: Ranks,
    experts: ExpertShare | None,
) -> Share:
    """A share of a rank with the first heads of each layer on the first rank."""
    heads = [RankHeads.of([range(each.call.num_kv_heads)], each.call.num_heads, ranks) for each in layers]
    cutter = make_cutter(config, whole, layers, heads, ranks, experts)
    return Share(ranks.rank, narrow, heads, cutter)


class _ByToken(nn.Module):
    """A table that can be read by tokens alone, as ranks have it."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(token_ids)
        return rows


def _read_by_token(family: str, narrow: PreTrainedModel, sums: Sums) -> tuple[DecoderLayer, ...]:
    """Return the layers of a shard; raise ValueError for a model that cannot be sharded."""
    for path in sums.tables:
        parent, _, name = path.rpartition(".")
        setattr(narrow.get_submodule(parent), name, _ByToken(narrow.get_submodule(path)))
    try:
        return read_layers(narrow)
    except ValueError as error:
        raise ValueError(f"{family!r} cannot be served by several ranks: {error}") from error


def _check_shapes(family: str, cutter: Cutter, whole: nn.Module, narrow: nn.Module) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in narrow.state_dict().items()}
    for name, tensor in whole.state_dict().items():
        shape = cutter.cut_shape(name, tensor.shape)
        if shape != expected.get(name):
            fitting = list(expected[name]) if name in expected else None
            raise ValueError(
                f"{family!r} cannot be served by several ranks: expected slices of {name} that fit a model "
                f"with fewer heads and smaller widths, {fitting} of {list(tensor.shape)}, got {list(shape)}"
            )


def _check_sums(
    config: Any, cutter: Cutter, whole: PreTrainedModel, layers: Sequence[DecoderLayer], sums: Sums
) -> None:
    """Raise ValueError for sums of replicated modules, and for sharded modules without a sum."""
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    _check_all_are_summed(config.model_type, cutter, whole, sums)
    paths = {id(module): path for path, module in whole.named_modules()}
    # Norms of each head.
    may_norm = {id(each.mixer) for each in recurrent_layers(whole)} | {id(each.attention) for each in layers}
    for own in sums.layers:
        for child in (whole.get_submodule(f"{own.path}.{name}") for name in own.children):
            found = [paths[id(part)] for part in child.modules() if "norm" in type(part).__name__.lower()]
            if found and id(child) not in may_norm:
                raise ValueError(
                    f"{config.model_type!r} cannot be served by several ranks: expected {paths[id(child)]}, "
                    f"whose outputs are summed, to have no norms, got {found[0]}"
                )
            for parameter in child.parameters():
                name, shape = names[id(parameter)], list(parameter.shape)
                is_output = len(shape) > 1 and shape[-2] == config.hidden_size
                if is_output and cutter.cut(name, shape) is None:
                    raise ValueError(
                        f"{config.model_type!r} cannot be served by several ranks: expected ranks to share "
                        f"{name}, whose outputs are summed, got all of {shape} on each"
                    )


def _check_all_are_summed(family: str, cutter: Cutter, whole: PreTrainedModel, sums: Sums) -> None:
    """Raise ValueError for sharded tensors outside of all modules that are summed or gathered."""
    modules = [whole.get_submodule(f"{own.path}.{name}") for own in sums.layers for name in own.children]
    modules += [whole.get_submodule(path) for path in sums.tables]
    if (head := whole.get_output_embeddings()) is not None:
        modules.append(head)
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    for name, parameter in whole.named_parameters():
        if id(parameter) not in known and cutter.cut(name, parameter.shape) is not None:
            raise ValueError(
                f"{family!r} cannot be served by several ranks: expected them to share weights of modules "
                f"beside the attention, whose outputs are summed, got {name}"
            )


def _check_attention(
    name: str, number: int, whole: DecoderLayer, share: DecoderLayer, heads: RankHeads
) -> None:
    """Raise ValueError for attention that depends on the number of heads other than by sizes."""
    expected, got = _traits(whole.call), _traits(share.call)
    expected = (len(heads.query), len(heads.kv), *expected[2:])
    if expected != got:
        raise ValueError(
            f"{name}, layer {number}, cannot be served by several ranks: expected attention with (query "
            "heads, key/value heads, size of keys, of values, scale, window, soft cap, sink logits) "
            f"{expected} in a share, got {got}"
        )


def _traits(call: AttentionCall) -> tuple[object, ...]:
    return (
        *(call.num_heads, call.num_kv_heads, call.head_dim, call.value_head_dim, call.scale),
        *(call.sliding_window, call.softcap, call.has_sinks),
    )
