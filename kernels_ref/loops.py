"""Loops over slices and chunks outside a compiled layer, and their bodies."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch

from bias_builders import Rule, Window, causal_mask, decode_rule, encode_rule, ring_mask
from kernels_ref import reference
from kernels_ref.chunks import num_parts
from kernels_ref.formats import LATENT, PLAIN, KVFormat, format_of
from kernels_ref.hpu.attention import FusedOperators
from kernels_ref.hpu.parts import FusedKernels
from kernels_ref.partial import Partial, Scoring, Softmax, empty, merge
from kernels_ref.reference import add_blocks
from kernels_ref.sparse import as_keys, attend_dense, shared_visible, whole_visible
from kernels_ref.units import Encoding, KVUnits, UnitLayout, gather, part_places, units_of

Body: TypeAlias = Callable[..., Any]
RegionOf: TypeAlias = Callable[[Hashable, Body], Body]
"""Returns the function that runs a body as a region, by a key that identifies its code and parameters."""

_regions: ContextVar[RegionOf | None] = ContextVar("_regions", default=None)


class How(NamedTuple):
    """Parameters of a loop besides tensors.

    Attributes:
        scoring: soft cap and precision; sizes in it are not used.
        operators: fused operators to call.
        size: queries of a slice, or blocks of a chunk.
        num_rows: rows of the step (N).
        rounds: chunks of shared blocks that one body reads.
        rule: which earlier tokens a token sees; of rings, their window.
        layout: of the units that are read.
        format: of their keys and values.
        value_dim: elements of a value; 0 = as many as of a query.
    """

    scoring: Scoring
    operators: FusedOperators
    size: int
    num_rows: int = 0
    rounds: int = 1
    rule: Rule | None = None
    layout: UnitLayout | None = None
    format: KVFormat = PLAIN
    value_dim: int = 0

    def units(self, tensors: tuple[torch.Tensor, ...], q: torch.Tensor) -> KVUnits:
        """The units that are read, from the tensors of their store, for queries ``[*, D]``."""
        assert self.layout is not None, "blocks have a layout"
        dim = q.shape[-1]
        return units_of(tensors, self.layout, Encoding(self.format, dim, self.value_dim or dim, q.dtype))


Loop: TypeAlias = Callable[[torch.Tensor, Sequence[torch.Tensor], How], Partial]
"""A loop: from queries, other tensors and parameters to the partial of all queries."""

_loops: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    """Register a function under its name, for ``run_loop``."""
    _loops[function.__name__] = function
    return function


@contextmanager
def in_regions(region_of: RegionOf) -> Iterator[None]:
    """Run the bodies of loops as regions of a capture backend, within the context."""
    token = _regions.set(region_of)
    try:
        yield
    finally:
        _regions.reset(token)


def run_body(body: Body, how: How, *tensors: torch.Tensor) -> Any:
    """Call the body of a loop, as a region where there are regions.

    Args:
        body: a plain function of ``how`` and the tensors.
    """
    region_of = _regions.get()
    if region_of is None:
        return body(how, *tensors)
    sizes = tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors)
    return region_of(("loop", body.__name__, how, sizes), body)(how, *tensors)


def as_operator(name: str, q: torch.Tensor, tensors: Sequence[torch.Tensor], how: How) -> Partial:
    """Call a loop as one operator, for graphs.

    Args:
        name: of a function that is a ``loop``.
        q: queries, ``[*, K, G, D]``.
    """
    scoring, operators = how.scoring, how.operators
    flags = (
        *(int(scoring.softmax is Softmax.FAST), int(operators.attention), int(operators.softmax)),
        *(int(operators.block_softmax), operators.line_bytes, how.size, how.num_rows, how.rounds),
        how.value_dim,
    )
    rule = encode_rule(how.rule)
    ints = [*flags, len(rule), *rule, *(how.layout or ())]
    if how.format != PLAIN:
        name = f"{name} {how.format.name}"
    return Partial(*operator(name, q, list(tensors), ints, [scoring.softcap or 0.0, operators.inverse_scale]))


_VALUE_DIM = 8
"""Place of ``How.value_dim`` in the integers of an operator."""


def run_loop(
    name: str, q: torch.Tensor, tensors: Sequence[torch.Tensor], ints: Sequence[int], floats: Sequence[float]
) -> tuple[torch.Tensor, ...]:
    """Run a loop; the function of the operator.

    Args:
        name: of the loop, and behind a space that of the format of keys and values if it is not plain.
    """
    name, _, kv_format = name.partition(" ")
    plain = {"": PLAIN, LATENT.name: LATENT}
    fast, attention, softmax, blocks, line_bytes, size, num_rows, rounds, value_dim, length, *rest = ints
    layout = rest[length:]
    how = How(
        Scoring(floats[0] or None, Softmax.FAST if fast else Softmax.EXACT),
        FusedOperators(bool(attention), bool(softmax), bool(blocks), line_bytes, floats[1]),
        size,
        num_rows,
        rounds,
        decode_rule(rest[:length]),
        UnitLayout(*layout) if layout else None,
        plain.get(kv_format) or format_of(kv_format),
        value_dim,
    )
    return tuple(_loops[name](q, tensors, how))


def _shapes(
    _: str, q: torch.Tensor, __: object, ints: Sequence[int], ___: object
) -> tuple[torch.Tensor, ...]:
    return tuple(empty(q, ints[_VALUE_DIM] or None))


_library = torch.library.Library("hpu_duo_loops", "FRAGMENT")
_library.define(
    "run(str name, Tensor q, Tensor[] tensors, int[] ints, float[] floats) -> (Tensor, Tensor, Tensor)"
)
_library.impl("run", run_loop, "CompositeExplicitAutograd")
torch.library.register_fake("hpu_duo_loops::run", _shapes, lib=_library)
operator = torch.ops.hpu_duo_loops.run.default
"""The operator of a loop in a graph."""

Tensors: TypeAlias = tuple[torch.Tensor, ...]


def slices_reached(rule: Rule, size: int, most: int) -> int:
    """Slices before its own, ``most`` at most, that a slice of ``size`` tokens reaches, sinks apart."""
    for back in range(most, 0, -1):
        if rule.reaches((back - 1) * size + 1, (back + 1) * size - 1):
            return back
    return 0


def sinks_before(
    how: How,
    number: torch.Tensor,
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    causal_row: torch.Tensor,
    positions: torch.Tensor,
    row_query_start: torch.Tensor,
) -> Tensors:
    """A slice of queries against the sinks of the one row that may have begun before the slices it reaches.

    Args:
        number: of the slice, which has such slices before it.
    """
    rule = how.rule
    assert rule is not None, "without a rule all slices are reached"
    num_slices = num_parts(len(q_QKGD), how.size)
    first = (number - slices_reached(rule, how.size, num_slices)) * how.size
    owner = gather(causal_row, first)
    begins = torch.cat([row_query_start, row_query_start.new_zeros(1)])
    index = gather(begins, owner) + torch.arange(rule.sink, dtype=owner.dtype, device=owner.device)
    key_row = torch.where(index < first, owner, how.num_rows)
    index = torch.minimum(index, first - 1)
    return in_order(_meet(how, number, q_QKGD, k_QKD, v_QKD, causal_row, positions, index, key_row))


def own_keys(
    how: How,
    number: torch.Tensor,
    back: torch.Tensor,
    attn: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    causal_row: torch.Tensor,
    positions: torch.Tensor,
) -> Tensors:
    """A slice of queries against the slice of new keys that comes ``back`` slices before it."""
    index, exists = part_places(number - back, how.size, len(causal_row))
    key_row = torch.where(exists, gather(causal_row, index), how.num_rows)
    partial = _meet(how, number, q_QKGD, k_QKD, v_QKD, causal_row, positions, index, key_row)
    return *in_order(merge(Partial(attn, largest, total), partial)), back + 1


def _meet(
    how: How,
    number: torch.Tensor,
    q_QKGD: torch.Tensor,
    k_QKD: torch.Tensor,
    v_QKD: torch.Tensor,
    causal_row: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    key_row: torch.Tensor,
) -> Partial:
    """A slice of queries against some of the new keys, by index."""
    queries, _ = part_places(number, how.size, len(causal_row))
    row, position = gather(causal_row, queries), gather(positions, queries)
    visible_QT = causal_mask(
        row, position, key_row, gather(positions, index), no_row=how.num_rows, rule=how.rule
    )
    keys, values = gather(k_QKD, index), gather(v_QKD, index)
    return _dense(how)(gather(q_QKGD, queries), keys, values, visible_QT, how.scoring)


def shared_chunk(
    how: How,
    number: torch.Tensor,
    attn: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    q_QKGD: torch.Tensor,
    *tensors: torch.Tensor,
) -> Tensors:
    """Every query against some chunks of shared blocks, ``how.rounds`` of them.

    Args:
        tensors: those of the store, ``row_start``, ``row``, ``shared_block``, ``shared_start`` and
            ``shared_reads``; and ``positions``, if there is a rule.
    """
    num = how.format.num_tensors
    units, (row_start, row, block, start, reads_NX, *positions) = (
        how.units(tensors[:num], q_QKGD),
        tensors[num:],
    )
    # One more entry, for the row index of padding.
    stored = torch.cat([row_start, row_start.new_zeros(1)])[:, None]
    merged = Partial(attn, largest, total)
    for _ in range(how.rounds):
        some, exists = part_places(number, how.size, len(block))
        reads = reads_NX.index_select(1, some) * exists.to(reads_NX.dtype)
        begin = gather(start, some)
        seen, ruled = (gather(block, some), (stored - begin) * reads, row), None
        if how.rule is not None:
            ruled = shared_visible(how.rule, positions[0], begin, units.layout.num_slots)
        partial = reference.some_shared_blocks(q_QKGD, units, *seen, how.scoring, _dense(how), ruled)
        merged, number = merge(merged, partial), number + 1
    return *in_order(merged), number


def rings(
    how: How,
    number: torch.Tensor,
    q_QKGD: torch.Tensor,
    k_CKWD: torch.Tensor,
    v_CKWD: torch.Tensor,
    causal_row: torch.Tensor,
    positions: torch.Tensor,
    chunk_row: torch.Tensor,
    chunk_position: torch.Tensor,
) -> Tensors:
    """A slice of queries against the rings of prompts."""
    window = how.rule
    assert isinstance(window, Window), "rings have a window"
    queries, _ = part_places(number, how.size, len(causal_row))
    row, position = gather(causal_row, queries), gather(positions, queries)
    k_TKD, v_TKD = as_keys(k_CKWD, v_CKWD, chunk_position >= 0)
    visible_QCW = ring_mask(row, position, chunk_row, chunk_position, window)
    partial = _dense(how)(gather(q_QKGD, queries), k_TKD, v_TKD, visible_QCW.flatten(1), how.scoring)
    return *in_order(partial), number + 1


def unique_chunk(
    how: How,
    number: torch.Tensor,
    attn: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    q_NKHD: torch.Tensor,
    *tensors: torch.Tensor,
) -> Tensors:
    """Decode rows against one chunk of whole blocks, merged into their partials.

    A chunk is gathered, unless it has all blocks, which are read where they lie.

    Args:
        tensors: those of the store, and ``owner``; and positions of the first slots of blocks, and after
            tokens, if there is a rule.
    """
    num = how.format.num_tensors
    units = how.units(tensors[:num], q_NKHD)
    owner, *ruled = tensors[num:]
    if how.size < len(owner):
        some, exists = part_places(number, how.size, len(owner))
        k, v = units.tile(some)
        owner = torch.where(exists, gather(owner, some), len(q_NKHD))
        ruled[:1] = [gather(start, some) for start in ruled[:1]]
    else:
        k, v = units.tile(slice(0, len(owner)))
    seen = Partial(attn, largest, total)
    add, visible = FusedKernels(how.operators).add, None
    if how.rule is not None:
        start, end = ruled
        visible = whole_visible(how.rule, end, owner, start, units.layout.num_slots)
    return *in_order(add_blocks(seen, q_NKHD, k, v, owner, how.scoring, add, visible)), number + 1


def in_order(partial: Sequence[torch.Tensor]) -> Tensors:
    """Return tensors with the strides of new ones, along dimensions of size 1 as well.

    A device compiles for strides, so every round has inputs of the same strides.
    """
    return tuple(x.reshape(-1).view(x.shape) for x in partial)


def _dense(how: How) -> reference.Dense:
    fused = FusedKernels(how.operators)
    return fused.dense if fused.fuses(how.scoring) else attend_dense
