"""The attention problems that kernels are timed on: one part each, at sizes that fill a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from benchmarks.gpu_suite import cases
from benchmarks.gpu_suite.cases import Heads, Layout, RowSize
from benchmarks.gpu_suite.rivals import Dense
from benchmarks.gpu_suite.shapes import ModelShape, Sizes
from bias_builders import Window
from kernels_ref import (
    Blocks,
    KVUnits,
    NewKV,
    Partial,
    Rings,
    Scoring,
    as_units,
    of_stores,
    reference,
)
from kernels_ref.step import PartInputs
from kernels_ref.triton import availability, launch, parts
from kernels_ref.triton.launch import Triple
from kernels_ref.triton.stream_k_choice import choose

REFERENCE = "portable torch"
SPLIT = "Triton, split"
STREAM_K = "Triton, Stream-K"
TRITON = "Triton"


class Weighed(NamedTuple):
    """Attention, or None, with the weights that each key receives of it, ``[N, K, S]``."""

    partial: Partial | None
    mass: torch.Tensor


Result: TypeAlias = Partial | Weighed
"""Results of our implementations."""


@dataclass(frozen=True)
class Case:
    """One attention problem.

    Attributes:
        name: shown in tables.
        ours: implementations of the part, by name; the first is what the others are compared with.
        num_bytes: keys and values that must be read.
        flops: of both products, for visible pairs only.
        dense: the same problem for other packages, None if they cannot compute it.
        chosen: the implementation that the engine takes at this shape, if it has a choice.
    """

    name: str
    ours: dict[str, Callable[[], Result]]
    num_bytes: int
    flops: int
    dense: Dense | None = None
    chosen: str = ""
    notes: dict[str, str] = field(default_factory=dict)


def make_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """All cases, one at a time: each may take gigabytes."""
    for model in sizes.models:
        heads = Heads(model.num_kv_heads, model.group_size, model.head_dim)
        yield _unique(model, "one row", (sizes.unique_context,), heads, sizes, dtype, device)
    model = sizes.models[-1]
    heads = Heads(model.num_kv_heads, model.group_size, model.head_dim)
    for name, contexts in sizes.ragged:
        yield _unique(model, name, contexts, heads, sizes, dtype, device)
    yield _causal(model, None, heads, sizes, dtype, device)
    yield _causal(model, Window(model.sink, model.recent), heads, sizes, dtype, device)
    yield _shared(model, heads, sizes, dtype, device)
    yield _unique_rings(model, heads, sizes, dtype, device)
    yield _shared_rings(model, heads, sizes, dtype, device)


def _ours(
    device: torch.device, portable: Callable[[], Partial], **triton: Callable[[], Partial]
) -> tuple[dict[str, Callable[[], Result]], dict[str, str]]:
    """Implementations, and why those that cannot run here do not."""
    names = {"split": SPLIT, "stream_k": STREAM_K, "triton": TRITON}
    problem = availability.problem(device)
    if problem is not None:
        return {REFERENCE: portable}, {names[name]: problem for name in triton}
    return {REFERENCE: portable, **{names[name]: work for name, work in triton.items()}}, {}


def _unique(
    model: ModelShape,
    name: str,
    contexts: tuple[int, ...],
    heads: Heads,
    sizes: Sizes,
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    layout = cases.lay_out(
        [RowSize(context - 1, 1) for context in contexts], sizes.block_size, device, heads=heads
    )
    k, v = _stores(layout, heads, sizes, dtype, device)
    q, t = cases.queries(len(contexts), heads, dtype, device), layout.tensors
    inputs = PartInputs(q, cases.NO_KV, of_stores(k, v), t, Scoring())
    ours, notes = _ours(
        device,
        partial(reference.unique_blocks, inputs, layout.plans[Blocks()]),
        split=partial(run_unique, "split", inputs, layout),
        stream_k=partial(run_unique, "stream_k", inputs, layout),
    )
    dense = None
    if len(contexts) == 1:
        q_1H1D = q.flatten(1, 2)[:, :, None]
        dense = Dense(q_1H1D, cases.as_keys(k, contexts[0]), cases.as_keys(v, contexts[0]), causal=False)
    total = sum(contexts)
    return Case(
        f"unique part, {model.name}, {name} ({total} tokens)",
        ours,
        num_bytes=2 * total * heads.num_kv * heads.dim * dtype.itemsize,
        flops=4 * total * heads.num_kv * heads.group * heads.dim,
        dense=dense,
        chosen=choose_here(q, layout),
        notes=notes,
    )


def run_unique(name: str, inputs: PartInputs, layout: Layout) -> Partial:
    """Run one of the two kernels of the unique part, whichever the engine would choose."""
    from kernels_ref.triton.stream_k import stream_k
    from kernels_ref.triton.unique_blocks import split_unique_blocks

    run: Callable[..., Triple] = stream_k if name == "stream_k" else split_unique_blocks
    t, blocks, stored = layout.tensors, layout.plans[Blocks()], launch.check_stored(inputs.units, inputs.q)
    plan = (t.owner, t.tail_block, blocks.tails.visible, 0.0)
    return Partial(*run(inputs.q, *stored[:2], *plan, *stored.kinds))


def choose_here(q: torch.Tensor, layout: Layout, *, reads_codes: bool = False) -> str:
    """Return the kernel of the unique part that the engine takes."""
    limits = launch.device_limits(q.device)
    shape = q.shape[0], layout.tensors.owner.shape[0], q.shape[1]
    is_even = choose(*shape, limits, reads_codes=reads_codes)
    return STREAM_K if is_even else SPLIT


def _stores(
    layout: Layout, heads: Heads, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (layout.num_blocks + 1, heads.num_kv, sizes.block_size, heads.dim)
    return cases.random(shape, dtype, device, 2), cases.random(shape, dtype, device, 3)


def _causal(
    model: ModelShape,
    window: Window | None,
    heads: Heads,
    sizes: Sizes,
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    length = sizes.causal
    layout = cases.lay_out([RowSize(0, length)], sizes.block_size, device, heads=heads)
    q, t = cases.queries(length, heads, dtype, device), layout.tensors
    k, v = (cases.random((length, heads.num_kv, heads.dim), dtype, device, seed) for seed in (2, 3))
    unread = of_stores(*(x[None].transpose(1, 2).contiguous() for x in (k, v)))
    arguments = (PartInputs(q, NewKV(k, v), unread, t, Scoring(), window),)
    ours, notes = _ours(
        device, partial(reference.causal, *arguments), triton=partial(_run_part, "causal", *arguments)
    )
    dense = None
    if window is None:
        q_1HQD, k_1KTD, v_1KTD = (x.transpose(0, 1)[None] for x in (q.flatten(1, 2), k, v))
        dense = Dense(q_1HQD, k_1KTD, v_1KTD, causal=True)
    kind = "" if window is None else f", window {window.sink} + {window.recent}"
    return Case(
        f"causal part, {model.name}, {length} tokens{kind}",
        ours,
        num_bytes=2 * length * heads.num_kv * heads.dim * dtype.itemsize,
        flops=4 * visible_pairs(length, window) * heads.num_kv * heads.group * heads.dim,
        dense=dense,
        notes=notes,
    )


def visible_pairs(length: int, window: Window | None) -> int:
    """Pairs of query and key that a prompt's tokens see of each other."""
    if window is None:
        return length * (length + 1) // 2
    return sum(min(position + 1, window.size) for position in range(length))


def _run_part(name: str, *arguments: object) -> Partial:
    return getattr(parts, name)(*arguments)


def _shared(model: ModelShape, heads: Heads, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    chunk, context = sizes.chunk, sizes.shared_context
    layout = cases.lay_out([RowSize(context, chunk)], sizes.block_size, device, heads=heads)
    k, v = _stores(layout, heads, sizes, dtype, device)
    q, units = cases.queries(chunk, heads, dtype, device), of_stores(k, v)
    arguments = (PartInputs(q, cases.NO_KV, units, layout.tensors, Scoring()),)
    ours, notes = _ours(
        device,
        partial(reference.shared_blocks, *arguments),
        triton=partial(_run_part, "shared_blocks", *arguments),
    )
    q_1HQD = q.flatten(1, 2).transpose(0, 1)[None]
    return Case(
        f"shared part, {model.name}, {chunk} queries on {context} tokens",
        ours,
        num_bytes=2 * context * heads.num_kv * heads.dim * dtype.itemsize,
        flops=4 * chunk * context * heads.num_kv * heads.group * heads.dim,
        dense=Dense(q_1HQD, cases.as_keys(k, context), cases.as_keys(v, context), causal=False),
        notes=notes,
    )


def _unique_rings(
    model: ModelShape, heads: Heads, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Case:
    window, num_rows = Window(model.sink, model.recent), sizes.ring_rows
    rows = [RowSize(4 * window.size, 1)] * num_rows
    layout = cases.lay_out(rows, sizes.block_size, device, heads=heads, window=window)
    units = _rings(num_rows, window, heads, dtype, device)
    ring = layout.plans[Rings(window)]
    q = cases.queries(num_rows, heads, dtype, device)
    arguments = (PartInputs(q, cases.NO_KV, units, layout.tensors, Scoring(), window), ring)
    ours, notes = _ours(
        device,
        partial(reference.unique_rings, *arguments),
        triton=partial(_run_part, "unique_rings", *arguments),
    )
    slots = num_rows * window.size
    return Case(
        f"unique rings, {model.name}, {num_rows} rows of {window.size}",
        ours,
        num_bytes=2 * slots * heads.num_kv * heads.dim * dtype.itemsize,
        flops=4 * slots * heads.num_kv * heads.group * heads.dim,
        notes=notes,
    )


def _shared_rings(
    model: ModelShape, heads: Heads, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Case:
    window, chunk = Window(model.sink, model.recent), sizes.chunk
    start = 4 * window.size
    layout = cases.lay_out([RowSize(start, chunk)], sizes.block_size, device, heads=heads, window=window)
    units = _rings(1, window, heads, dtype, device)
    units = units._replace(scratch=tuple(view[:1].clone() for view in units.views))
    ring = layout.plans[Rings(window)]
    q = cases.queries(chunk, heads, dtype, device)
    arguments = (PartInputs(q, cases.NO_KV, units, layout.tensors, Scoring(), window), ring)
    ours, notes = _ours(
        device,
        partial(reference.shared_rings, *arguments),
        triton=partial(_run_part, "shared_rings", *arguments),
    )
    # The sinks, and of the recent tokens what is still near enough.
    pairs = sum(window.sink + max(0, window.recent - 1 - offset) for offset in range(chunk))
    return Case(
        f"shared rings, {model.name}, {chunk} queries on a ring of {window.size}",
        ours,
        num_bytes=2 * window.size * heads.num_kv * heads.dim * dtype.itemsize,
        flops=4 * pairs * heads.num_kv * heads.group * heads.dim,
        notes=notes,
    )


def _rings(num_rows: int, window: Window, heads: Heads, dtype: torch.dtype, device: torch.device) -> KVUnits:
    layout = cases.ring_layout(num_rows, window, heads)
    shape = (layout.num_units * layout.unit_stride, heads.dim)
    return as_units(*(cases.random(shape, dtype, device, seed) for seed in (2, 3)), layout)
