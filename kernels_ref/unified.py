"""A step, and its attention in one layer: every group of heads stores its new keys and values, and attends.

Shapes: Q query tokens, H query heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch

from kernels_ref.chunks import DEFAULT_BOUNDS, DEFAULT_SLICES, ChunkBounds, Slices
from kernels_ref.decoding import DecodingKernels, WrappingKernels
from kernels_ref.formats import LATENT
from kernels_ref.groups import GroupKind, HeadGroup, LatentKV, Owner
from kernels_ref.hpu.attention import NO_OPERATORS, FusedOperators
from kernels_ref.impl import Implementation, Kernels, kernels, looped
from kernels_ref.pages import PageStep
from kernels_ref.partial import Partial, Scoring, Softmax, merge, normalise, placed, sink_logits
from kernels_ref.recurrent.kind import Recurrence, prepare_recurrences
from kernels_ref.rows import RowKind
from kernels_ref.step import DecodeRows, PartInputs, PlanKey, Step, StepParts, StepTensors
from kernels_ref.units import KVUnits, NewKV, StoreTurn, UnitLayout

LayerCache: TypeAlias = tuple[KVUnits, ...]
"""Stores of one layer: the units of each of its groups."""


@dataclass(frozen=True)
class LayerSpec:
    """Parameters of a layer's attention besides tensors; fixed for a captured step.

    Attributes:
        groups: its key/value heads, in order.
        group_size: query heads per key/value head.
        head_dim: size of keys.
        scale: factor of the scores.
        softcap: bound of the scores, None when the model has none.
        impl: implementation of the kernels.
        softmax: precision of scores and exponentials.
        operators: fused operators that ``impl`` calls, if any.
        slices: sizes of what ``impl`` computes at a time.
        chunks: bounds of chunks of context, from which their sizes follow.
        rows: kinds of state that rows have besides what heads store.
        value_head_dim: size of values; None = that of keys.
        turn: its place among layers that read the same stores, with the same keys and values.
        needs_decoding: whether some of the stores have a format that ``impl`` does not read.
    """

    groups: tuple[HeadGroup, ...]
    group_size: int
    head_dim: int
    scale: float
    softcap: float | None
    impl: Implementation
    softmax: Softmax = Softmax.EXACT
    operators: FusedOperators = NO_OPERATORS
    slices: Slices = DEFAULT_SLICES
    chunks: ChunkBounds = DEFAULT_BOUNDS
    rows: tuple[RowKind, ...] = ()
    turn: StoreTurn = StoreTurn.ONLY
    value_head_dim: int | None = None
    needs_decoding: bool = field(init=False)

    def __post_init__(self) -> None:
        is_read = all(self.impl.serves(group.format) for group in self.groups)
        object.__setattr__(self, "needs_decoding", not is_read)

    @property
    def writes(self) -> bool:
        """Whether its stores are its own: False for a layer that reads those of an earlier one."""
        return self.turn.is_first

    @property
    def attends_for_some(self) -> bool:
        """Whether it may attend for the newest tokens of each row alone, where it stores nothing."""
        is_known = all(group.kind.attends_for_some for group in self.groups)
        return is_known and not self.writes and self.impl is not Implementation.TRITON

    @property
    def value_dim(self) -> int:
        """Size of values."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def scoring(self) -> Scoring:
        """The rule from scores of the layer to weights."""
        return Scoring(self.softcap, self.softmax, self.slices, self.chunks)

    @property
    def stores_latents(self) -> bool:
        """Whether the layer gets latents in place of keys and values."""
        return any(group.kind.plain_format == LATENT for group in self.groups)

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of all groups."""
        return sum(group.num_heads for group in self.groups)

    @property
    def num_retrieval(self) -> int:
        """Key/value heads that see all tokens of a request, on whichever rank they are stored."""
        return sum(group.num_heads for group in self.groups if group.kind.reach is None)


def format_names(specs: Iterable[LayerSpec]) -> tuple[str, ...]:
    """Names of the formats of keys and values in some layers, of blocks only where there are any."""
    groups = [group for spec in specs for group in spec.groups]
    in_blocks = [group for group in groups if group.kind.owner is Owner.BLOCK]
    return tuple(sorted({group.format.name for group in in_blocks or groups}))


def stores_of(
    specs: Iterable[LayerSpec], caches: Iterable[Sequence[KVUnits]]
) -> dict[GroupKind, tuple[UnitLayout, ...]]:
    """The kinds of groups in some layers, with the distinct layouts of their stores: what a step prepares."""
    found: dict[GroupKind, dict[UnitLayout, None]] = {}
    for spec, cache in zip(specs, caches):
        for group, units in zip(spec.groups, cache):
            found.setdefault(group.kind, {})[units.layout] = None
    return {kind: tuple(layouts) for kind, layouts in found.items()}


def prepare_step(
    parts: StepParts,
    tensors: StepTensors,
    *,
    decode_len: int,
    stores: Mapping[GroupKind, Sequence[UnitLayout]],
    mask_dtype: torch.dtype | None = None,
    recurrences: Sequence[Recurrence] = (),
) -> Step:
    """Derive on the device, once a step, the tensors that all layers need.

    Args:
        decode_len: most tokens of a decode row (M).
        stores: the kinds of head groups, with the distinct layouts of their stores.
        mask_dtype: type of queries where kernels read masks, see ``Implementation.reads_masks``; None where
            they derive visibility themselves.
        recurrences: of all layers.
    """
    rows = DecodeRows.of(parts, tensors, decode_len)
    plans: dict[PlanKey, Any] = {}
    for kind, layouts in stores.items():
        prepared: Mapping[UnitLayout, Any] = kind.prepare(parts, tensors, rows, layouts)
        if mask_dtype is not None and parts.unique:
            prepared = kind.masked(prepared, mask_dtype)
        for layout, plan in prepared.items():
            plans[kind.key, layout] = plan
    keeps_rows = mask_dtype is not None and parts.has_decodes_only
    if recurrences:
        plans |= prepare_recurrences(recurrences, parts, tensors)
    return Step(parts, tensors, decode_len, rows.token, rows.slot, plans, keeps_rows)


@dataclass(frozen=True)
class ReadOnlyKernels(WrappingKernels):
    """Kernels of a layer that reads the stores of an earlier one, which has written them in the same step.

    Args:
        inner: all kernels but those that write.
    """

    def write_kv(self, units: KVUnits, index: torch.Tensor, new: NewKV) -> None:
        """Write nothing."""

    def write_bounds(self, units: KVUnits, plan: PageStep, block_size: int) -> None:
        """Write nothing."""


@dataclass(frozen=True)
class SomeKernels(WrappingKernels):
    """Kernels of a layer whose queries are some tokens, with new keys of all.

    Args:
        inner: all kernels but ``causal``.
        keys: the plan of all tokens.
    """

    keys: StepTensors

    def causal(self, inputs: PartInputs) -> Partial:
        """Some tokens of prompt rows against the new keys of their own row."""
        found: Partial = self.inner.causal_of_some(inputs, self.keys)
        return found


@dataclass(frozen=True)
class RowKernels(WrappingKernels):
    """Kernels of a layer in a step of decodes only, with results in the order of the rows' tokens.

    Args:
        inner: all kernels but ``finish``.
    """

    def finish(
        self,
        q_QKGD: torch.Tensor,
        of_tokens: list[Partial],
        of_rows: Partial | None,
        decode_slot: torch.Tensor,
        sinks_KG: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add sink logits and normalise: ``[L, K, G, D]``."""
        assert of_rows is not None, "a step of decodes has the unique part"
        return normalise(of_rows if sinks_KG is None else sink_logits(sinks_KG, of_rows), q_QKGD.dtype)


class ElsewherePartials(NamedTuple):
    """Attention to keys that are stored elsewhere.

    Attributes:
        of_tokens: of all tokens, ``[Q, K, G, ...]``, or None.
        of_rows: of the tokens of decode rows, ``[N * M, K, G, ...]``, or None.
    """

    of_tokens: Partial | None
    of_rows: Partial | None


class Elsewhere(Protocol):
    """Attention of a layer to keys that are stored elsewhere, while its own kernels run."""

    def begin(
        self, place: int, run: Kernels, inputs: PartInputs, step: Step
    ) -> Callable[[], ElsewherePartials] | None:
        """Begin the attention of a group of heads.

        Args:
            place: number of the group.
            run: kernels of the layer.

        Returns:
            What waits for the partials; None if no keys of the group are elsewhere.
        """
        ...


@dataclass(frozen=True)
class JoiningKernels(WrappingKernels):
    """Kernels of a group of heads of which some keys are stored elsewhere.

    Args:
        inner: all kernels but ``finish``.
        join: returns the partials over these keys.
    """

    join: Callable[[], ElsewherePartials]

    def finish(
        self,
        q_QKGD: torch.Tensor,
        of_tokens: list[Partial],
        of_rows: Partial | None,
        decode_slot: torch.Tensor,
        sinks_KG: torch.Tensor | None,
    ) -> torch.Tensor:
        """Merge the partials over keys elsewhere too."""
        tokens, rows = self.join()
        if rows is not None:
            of_rows = rows if of_rows is None else merge(of_rows, rows)
        further = [] if tokens is None else [tokens]
        return self.inner.finish(q_QKGD, [*of_tokens, *further], of_rows, decode_slot, sinks_KG)


def layer_kernels(spec: LayerSpec, parts: StepParts) -> Kernels:
    """Return the kernels of a layer, which read the formats of its stores.

    Args:
        parts: that the step runs.
    """
    run = looped(kernels(spec.impl, spec.operators), spec.scoring, spec.operators, parts)
    if spec.needs_decoding:
        run = cast("Kernels", DecodingKernels(run, spec.impl))
    return run


def unified_attention(
    q_QHD: torch.Tensor,
    k_QKD: torch.Tensor | LatentKV,
    v_QKD: torch.Tensor,
    cache: Iterable[KVUnits],
    step: Step,
    spec: LayerSpec,
    sinks_H: torch.Tensor | None = None,
    elsewhere: Elsewhere | None = None,
) -> torch.Tensor:
    """Store the new keys and values and attend with every head of a layer.

    Args:
        q_QHD, k_QKD, v_QKD: after rotary embedding; heads in the order of the groups. Groups that store
            latents get those instead of keys, and values that are not read.
        cache: units of each group, written in place; iterated once.
        sinks_H: learned attention-sink logit of each query head.
        elsewhere: attention to keys that are not in ``cache``; None = all are.
        step: with ``keys`` where the queries are those of some tokens alone.
    Returns:
        ``[Q, H, D]`` in the dtype of ``q_QHD``; zero for padding.
    """
    scoring, run = spec.scoring, layer_kernels(spec, step.parts)
    if step.keeps_rows:
        run = cast("Kernels", RowKernels(run))
    if step.keys is not None:
        run = cast("Kernels", SomeKernels(run, step.keys))
    q_QKGD = (q_QHD * spec.scale).unflatten(1, (-1, spec.group_size))
    sinks_KG = None if sinks_H is None else sinks_H.view(-1, spec.group_size)
    outputs, end = [], 0
    for place, (group, units) in enumerate(zip(spec.groups, cache)):
        begin, end = end, end + group.num_heads
        new: Any
        if isinstance(k_QKD, LatentKV):
            new = k_QKD.of_heads(begin, end)
        else:
            new = NewKV(k_QKD[:, begin:end], v_QKD[:, begin:end])
        sinks = None if sinks_KG is None else sinks_KG[begin:end]
        if spec.turn is not StoreTurn.ONLY:
            units = units._replace(turn=spec.turn)
        inputs = PartInputs(q_QKGD[:, begin:end], new, units, step.tensors, scoring, sinks=sinks)
        of_group = run
        if not (spec.writes or group.kind.chooses_last):
            of_group = cast("Kernels", ReadOnlyKernels(run))
        if elsewhere is not None and (join := elsewhere.begin(place, of_group, inputs, step)) is not None:
            of_group = cast("Kernels", JoiningKernels(of_group, join))
        output = group.kind.attend(of_group, inputs, step)
        # A group that only stores heads of other ranks has no result.
        if group.num_heads or len(spec.groups) == 1:
            outputs.append(output)
    out_QKGD = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    # The result of the only token of a step is in place, and zero if it is padding.
    if step.keeps_rows and not len(q_QHD) == len(out_QKGD) == 1:
        out_QKGD = placed(out_QKGD, step.decode_slot)
    return out_QKGD.flatten(1, 2)
