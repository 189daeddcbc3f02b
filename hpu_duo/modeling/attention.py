"""The attention function that transformers models call; ``loading`` registers it under ``NAME``.

In a step it reads the layer's stores and the step from the attention module, whatever arguments the family
passes on. At load, it records calls for a probe, or attends for a trial, see ``attending``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from graphs import BatchShape
from graphs.backends.compile import cut_at
from graphs.backends.replay import results_unused
from hpu_duo.modeling.latents import Expansion, LatentProjection
from kernels_ref import (
    Encoding,
    KVUnits,
    LatentKV,
    LatentSize,
    LayerCache,
    LayerSpec,
    PromptRegions,
    ReaderSums,
    SlotState,
    Step,
    UnitLayout,
    loops,
    unified_attention,
)
from kernels_ref.formats.fp8 import Fp8
from kernels_ref.unified import Elsewhere
from kernels_ref.units import gather

RowTensors: TypeAlias = tuple[tuple[torch.Tensor, ...], ...]
"""Tensors of the row states of a layer, in the order of ``LayerSpec.rows``."""

NAME = "hpu_duo"
cut_at(loops.operator, loops.run_loop)
LAYER_ATTRIBUTE = "hpu_duo_layer"
_NO_STEP = f"attention implementation {NAME!r}: expected a step of an engine, got a call outside of one"

# Arguments of a decoder's attention besides tensors, and which of them change the result.
_HONOURED = {"scaling", "sliding_window", "softcap", "s_aux"}
_HARMLESS = {
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


@dataclass(frozen=True)
class AttentionCall:
    """A recorded call of one layer's attention.

    Attributes:
        module: the attention module.
        num_heads, num_kv_heads, head_dim, value_head_dim: read from the tensors.
        scale: factor of the scores.
        sliding_window: tokens that a token sees, itself included; None for all.
        softcap: bound of the scores, or None.
        has_sinks: whether the layer has attention-sink logits.
        mask: what the layer got as its mask.
        unknown: names of unknown arguments that are set.
        source: number of the first call with the same keys and values; None = this is the first one.
        latent: sizes of the latents that its keys and values are expanded from; None = they are not.
    """

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    scale: float
    sliding_window: int | None
    softcap: float | None
    has_sinks: bool
    mask: torch.Tensor | None
    unknown: tuple[str, ...]
    source: int | None = None
    latent: LatentSize | None = None


@dataclass
class Probe:
    """Attends in place of layers with stores: records the calls of one forward, in order.

    Attributes:
        expansions: of latents, by the ``id`` of their modules.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    expansions: Mapping[int, Expansion] = field(default_factory=dict)
    _keys: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def record(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Record the call of a layer; returns zeros in the shape of its output."""
        scale = kwargs.get("scaling")
        known = _HONOURED | _HARMLESS
        same = (number for number, (key, value) in enumerate(self._keys) if key is k and value is v)
        source = next(same, None)
        self._keys.append((k, v))
        expansion = self.expansions.get(id(module))
        is_expanded = expansion is not None and expansion.k is k and expansion.v is v
        self.calls.append(
            AttentionCall(
                module=module,
                num_heads=q.shape[1],
                num_kv_heads=k.shape[1],
                head_dim=q.shape[3],
                value_head_dim=v.shape[3],
                scale=q.shape[3] ** -0.5 if scale is None else float(scale),
                sliding_window=kwargs.get("sliding_window"),
                softcap=kwargs.get("softcap"),
                has_sinks=kwargs.get("s_aux") is not None,
                mask=mask,
                unknown=tuple(sorted(n for n, x in kwargs.items() if x is not None and n not in known)),
                source=source,
                latent=expansion.size if expansion is not None and is_expanded else None,
            )
        )
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


class Trial(ABC):
    """Attends in place of layers with stores."""

    @abstractmethod
    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """``[1, heads, Q, D]`` each, and sink logits ``[H]``, to ``[1, Q, H, D]``."""


@contextmanager
def attending(module: nn.Module, by: Probe | Trial) -> Iterator[None]:
    """Let a probe or a trial attend for a module and all modules in it, instead of layers with stores."""
    members = [vars(each) for each in module.modules()]
    before = [each.get(LAYER_ATTRIBUTE) for each in members]
    for each in members:
        each[LAYER_ATTRIBUTE] = by
    try:
        yield
    finally:
        for each, earlier in zip(members, before):
            if earlier is None:
                del each[LAYER_ATTRIBUTE]
            else:
                each[LAYER_ATTRIBUTE] = earlier


@dataclass
class RunningStep:
    """The step that a model runs, where all its layers find it; None between steps.

    Attributes:
        turn: what runs a layer in place of its call, where several steps run at once; None = the call does.
    """

    step: Step | None = None
    turn: Callable[[Callable[[], Any]], Any] | None = None


class _StoreNames(NamedTuple):
    """The units of a group of heads, with names of buffers in place of tensors.

    Attributes:
        layout, encoding: of the units.
        store, scratch, state, regions, sums: names; empty where there is no such tensor.
        region_layout: of the regions, if there are any.
    """

    layout: UnitLayout
    encoding: Encoding
    store: tuple[str, ...]
    scratch: tuple[str, ...]
    state: tuple[str, ...]
    regions: tuple[str, ...]
    sums: tuple[str, ...]
    region_layout: UnitLayout | None


def _ranges(spec: LayerSpec, place: int) -> tuple[tuple[int, int, float], ...]:
    """Heads with a format of constant scales of keys (0) or values (1), and the largest number of each."""
    found, begin = [], 0
    for group in spec.groups:
        end, vectors = begin + group.num_heads, (group.format.keys, group.format.values)[place]
        if isinstance(vectors, Fp8):
            found.append((begin, end, vectors.largest))
        begin = end
    return tuple(found)


class AttentionLayer(nn.Module):
    """The stores of one layer as buffers, so that they are inputs of compiled layers.

    One compiled function then serves all layers whose specs and layouts are equal. Stores are lists of
    vectors; each layer derives the views of units that attention reads.

    Args:
        scales: of keys and of values, which are divided by them for all stores of the layer; scores and
            results are those of the keys and values themselves.
        latents: the projection of a layer that stores latents, which gets them in place of keys and values.

    Attributes:
        elsewhere: attention to keys besides those of the stores; None = there are none.
        counts_clipped: whether heads store keys or values in a format of constant scales.
        clipped: int32 ``[2]``, elements of keys and of values of prompts that were beyond its range, where
            ``counts_clipped``. Decodes are not counted: they would run one more operator.
    """

    kv_scales: torch.Tensor
    clipped: torch.Tensor

    def __init__(
        self,
        spec: LayerSpec,
        cache: LayerCache,
        running: RunningStep,
        rows: RowTensors = (),
        scales: tuple[float, float] | None = None,
        latents: LatentProjection | None = None,
    ) -> None:
        super().__init__()
        self.latents = latents
        self.has_scales = scales is not None
        if scales is not None:
            device = cache[0].tensors[0].device
            self.register_buffer("kv_scales", torch.tensor(scales, device=device), persistent=False)
        self._ranges = tuple(_ranges(spec, place) for place in (0, 1))
        self.counts_clipped = any(self._ranges) and spec.writes
        if self.counts_clipped:
            self.register_buffer(
                "clipped",
                torch.zeros(2, dtype=torch.int32, device=cache[0].tensors[0].device),
                persistent=False,
            )
        self.spec, self.running = spec, running
        self._attends_for_some = spec.attends_for_some
        self.elsewhere: Elsewhere | None = None
        self.parts = tuple(self._register(i, units) for i, units in enumerate(cache))
        self.layouts = tuple((part.layout, part.region_layout) for part in self.parts)
        self._rows = tuple(
            (kind, tuple(f"{kind.name}_{each.name}" for each in kind.tensors)) for kind in spec.rows
        )
        for (_, names), tensors in zip(self._rows, rows, strict=True):
            for name, tensor in zip(names, tensors):
                self.register_buffer(name, tensor, persistent=False)

    def _register(self, group: int, units: KVUnits) -> _StoreNames:
        """Make buffers of all tensors of a group of heads."""
        regions = units.regions
        return _StoreNames(
            units.layout,
            units.encoding,
            self._make_buffers(f"store_{group}", units.tensors),
            self._make_buffers(f"scratch_{group}", units.scratch or ()),
            self._make_buffers(f"slot_{group}", units.state or ()),
            self._make_buffers(f"region_{group}", () if regions is None else regions.tensors),
            self._make_buffers(f"sum_{group}", units.sums or ()),
            None if regions is None else regions.layout,
        )

    def _make_buffers(self, name: str, tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """Make buffers of tensors, and return their names."""
        names = tuple(f"{name}_{place}" for place in range(len(tensors)))
        for each, tensor in zip(names, tensors):
            self.register_buffer(each, tensor, persistent=False)
        return names

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        step = self.running.step
        if step is None:
            raise ValueError(_NO_STEP)
        of_some = None
        if (wanted := step.wanted) is not None and len(q) < len(k):
            if self._attends_for_some and self.elsewhere is None:
                step = step.of_wanted
            else:
                of_some = wanted.token
                q = gather(torch.cat([q, q.new_zeros(1, *q.shape[1:])]), wanted.place)
        # One after the other: a graph that writes a store must not use a view of it from before a cut.
        cache = (self._units(part) for part in self.parts)
        if self.has_scales:
            k_scale, v_scale = self.kv_scales.unbind()
            q, k, v = q * k_scale, k / k_scale, v / v_scale
        if self.counts_clipped and step.parts.causal:
            self._count_clipped(k, v, step)
        keys: torch.Tensor | LatentKV = k if self.latents is None else self.latents(k, v)
        output = unified_attention(q, keys, v, cache, step, self.spec, sinks, self.elsewhere)
        if self.has_scales:
            output = output * v_scale
        for kind, names in self._rows:
            kind.advance(tuple(getattr(self, name) for name in names), step)
        return output if of_some is None else gather(output, of_some)

    def _count_clipped(self, k: torch.Tensor, v: torch.Tensor, step: Step) -> None:
        is_prompt = step.tensors.causal_row < step.tensors.row_start.shape[0]
        counts = []
        for x, ranges in zip((k, v), self._ranges):
            found = torch.zeros_like(is_prompt, dtype=torch.int32)
            for begin, end, largest in ranges:
                found = found + (x[:, begin:end].abs() > largest).sum(dim=(1, 2), dtype=torch.int32)
            counts.append(torch.where(is_prompt, found, 0).sum(dtype=torch.int32))
        self.clipped.add_(torch.stack(counts))

    def _units(self, part: _StoreNames) -> KVUnits:
        store, scratch, state, regions, sums = (
            tuple([getattr(self, name) for name in names])
            for names in (part.store, part.scratch, part.state, part.regions, part.sums)
        )
        return KVUnits(
            store,
            part.layout.views(store),
            part.layout,
            part.encoding,
            scratch or None,
            SlotState(*state) if state else None,
            PromptRegions(regions[:2], regions[2], part.region_layout) if part.region_layout else None,
            ReaderSums(*sums) if sums else None,
        )


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    Args:
        query, key, value: ``[1, heads, Q, D]``, after rotary embedding.
        attention_mask: recorded by a probe only; visibility is part of the step.

    Returns:
        ``[1, Q, H, D]`` and no weights.

    Raises:
        ValueError: it is called outside of a step.
    """
    layer = getattr(module, LAYER_ATTRIBUTE, None)
    if isinstance(layer, Probe):
        return layer.record(module, query, key, value, attention_mask, kwargs), None
    if isinstance(layer, Trial):
        return layer.attend(module, query, key, value, kwargs.get("s_aux")), None
    if layer is None:
        raise ValueError(_NO_STEP)
    tokens_first = (x[0].transpose(0, 1) for x in (query, key, value))
    # Some families view the result as [1, Q, H * D].
    return layer(*tokens_first, kwargs.get("s_aux"))[None].contiguous(), None


def placeholder_mask(device: torch.device) -> torch.Tensor:
    """A mask that transformers passes on as it is, without building one of its own.

    Four dimensions mean "prepared by the caller"; our attention function never reads it.
    """
    return torch.zeros(1, 1, 1, 1, device=device)


# The index of a layer always differs, and affects only the place of its cache.
_NUMBERING = {"layer_idx", "layer_id", "training"}


class LayerKind:
    """Everything about a layer that its compiled code may depend on: structure, shapes, plain values.

    Its attention included, which ``spec`` describes.

    Compiled layers are called without guards, so two layers are of one kind only if nothing that Python code
    could branch on differs. Hashed once, because it is looked up in every layer of every step.
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
    if is_dataclass(value) and not isinstance(value, type):
        # Those that are compared by their fields and do not change, such as the rounding of inputs.
        is_value = value.__hash__ is not None and type(value).__eq__ is not object.__eq__
        return is_value and all(_is_plain(getattr(value, each.name)) for each in fields(value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


class LiveRows:
    """Two pairs of numbers that captured layers read as they run: rows they get, and rows that count.

    A layer with another number of rows than in its pair computes all of them, as all layers do before the
    first step.

    Attributes:
        tokens, logits: int32 ``[2]`` on the host, for layers that see query tokens, and for the model's head.
    """

    def __init__(self) -> None:
        self.tokens, self.logits = (torch.zeros(2, dtype=torch.int32) for _ in range(2))
        self._tokens, self._logits = self.tokens.numpy(), self.logits.numpy()

    def set(self, shape: BatchShape, bucket: BatchShape, decode_len: int = 1) -> None:
        """The next step has ``shape`` and runs as ``bucket``; valid rows are first in both.

        Args:
            decode_len: logits of each row.
        """
        num_logits = shape.num_logits * decode_len
        # An unknown head may have as many rows as tokens.
        live = max(shape.query_len, num_logits)
        self._tokens[:] = bucket.query_len, live
        self._logits[:] = bucket.num_logits * decode_len, num_logits

    @contextmanager
    def none_of(self, bucket: BatchShape, decode_len: int = 1) -> Iterator[None]:
        """Steps inside run as ``bucket`` and are padding from the first row to the last."""
        self._tokens[:] = bucket.query_len, 0
        self._logits[:] = bucket.num_logits * decode_len, 0
        try:
            with results_unused():
                yield
        finally:
            self._tokens[:] = self._logits[:] = 0
