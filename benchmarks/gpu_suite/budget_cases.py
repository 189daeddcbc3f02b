"""Decodes of heads with a budget against full attention, and what the weights of a prompt's chunk cost.

Cases of one name are one problem by several methods, each compared with a portable implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu_suite import cases
from benchmarks.gpu_suite.cases import NOTHING, Heads, RowSize
from benchmarks.gpu_suite.kernel_cases import Case, Result, Weighed, visible_pairs
from benchmarks.gpu_suite.shapes import ModelShape, Sizes
from bias_builders import Leading
from kernels_ref import (
    Blocks,
    NewKV,
    Partial,
    Scoring,
    Scratch,
    UnitLayout,
    as_units,
    merge,
    of_stores,
    reference,
)
from kernels_ref.groups import RingStep
from kernels_ref.groups.column_sums import ChunkStep, log_sum_exp
from kernels_ref.impl import Kernels
from kernels_ref.step import PartInputs
from kernels_ref.triton import availability, parts

FULL_DECODE = "full attention"
WEIGHED_DECODE = "budget with weights"
PLAIN_DECODE = "budget without weights"
CHUNK = "attention of the chunk"
CHUNK_SUMS = "sums of its weights by key"
PORTABLE = ", portable torch"
BASELINES = (FULL_DECODE, CHUNK)
"""Systems that others of a case are divided by."""


def make_budget_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """All cases, one at a time: each may take gigabytes."""
    for model in sizes.models:
        for num_rows in sizes.budget_rows:
            yield _full(model, num_rows, sizes, dtype, device)
            yield from _budget(model, num_rows, sizes, dtype, device)
        yield from _chunk(model, sizes, dtype, device)


def _methods(
    name: str, work: Callable[[Kernels], Result], device: torch.device
) -> tuple[dict[str, Callable[[], Result]], dict[str, str]]:
    """A method by portable torch and by Triton, or why that does not run here."""
    portable = {name + PORTABLE: partial(work, reference)}
    problem = availability.problem(device)
    if problem is not None:
        return portable, {name: problem}
    return {**portable, name: partial(work, parts)}, {}


def _heads(model: ModelShape) -> Heads:
    return Heads(model.num_kv_heads, model.group_size, model.head_dim)


def _decode_name(model: ModelShape, num_rows: int, sizes: Sizes) -> str:
    rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
    return f"{model.name}, {rows} at {sizes.budget_context}, {sizes.budget_slots} slots"


def _full(model: ModelShape, num_rows: int, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    heads, context = _heads(model), sizes.budget_context
    layout = cases.lay_out([RowSize(context - 1, 1)] * num_rows, sizes.block_size, device, heads=heads)
    shape = (layout.num_blocks + 1, heads.num_kv, sizes.block_size, heads.dim)
    units = of_stores(*(cases.random(shape, dtype, device, seed) for seed in (2, 3)))
    q = cases.queries(num_rows, heads, dtype, device)

    def work(run: Kernels) -> Partial:
        return run.unique_blocks(
            PartInputs(q, cases.NO_KV, units, layout.tensors, Scoring()), layout.plans[Blocks()]
        )

    ours, notes = _methods(FULL_DECODE, work, device)
    return Case(
        _decode_name(model, num_rows, sizes),
        ours,
        **_decode_work(heads, num_rows * context, dtype),
        notes=notes,
    )


def _decode_work(heads: Heads, num_keys: int, dtype: torch.dtype) -> dict[str, int]:
    per_key = heads.num_kv * heads.dim
    return {
        "num_bytes": 2 * num_keys * per_key * dtype.itemsize,
        "flops": 4 * num_keys * per_key * heads.group,
    }


def _budget(
    model: ModelShape, num_rows: int, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Iterator[Case]:
    heads, num_slots = _heads(model), sizes.budget_slots
    layout = UnitLayout.dense(num_rows + 1, heads.num_kv, num_slots)
    shape = (layout.num_units * layout.unit_stride, heads.dim)
    units = as_units(*(cases.random(shape, dtype, device, seed) for seed in (2, 3)), layout)
    visible = torch.full((num_rows, 1, 1), num_slots, dtype=torch.int32, device=device)
    ring = RingStep(NOTHING, Leading(visible), NOTHING)
    q = cases.queries(num_rows, heads, dtype, device)

    inputs = PartInputs(q, cases.NO_KV, units, cases.NO_PLAN, Scoring())

    def weighed(run: Kernels) -> Weighed:
        return Weighed(*run.unique_with_weights(inputs, ring))

    def plain(run: Kernels) -> Partial:
        return run.unique_rings(inputs, ring)

    name, amounts = _decode_name(model, num_rows, sizes), _decode_work(heads, num_rows * num_slots, dtype)
    methods: dict[str, Callable[[Kernels], Result]] = {WEIGHED_DECODE: weighed, PLAIN_DECODE: plain}
    for method, work in methods.items():
        ours, notes = _methods(method, work, device)
        yield Case(name, ours, **amounts, notes=notes)


def _chunk(model: ModelShape, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    heads, num_slots, length = _heads(model), sizes.budget_slots, sizes.chunk
    start = 4 * num_slots
    t = cases.lay_out([RowSize(start, length)], sizes.block_size, device, heads=heads).tensors
    q = cases.queries(length, heads, dtype, device)
    new = NewKV(*(cases.random((length, heads.num_kv, heads.dim), dtype, device, seed) for seed in (2, 3)))
    shape = (1, heads.num_kv, num_slots, heads.dim)
    slots = Scratch(*(cases.random(shape, dtype, device, seed) for seed in (4, 5)))
    number = torch.arange(num_slots, dtype=torch.int32, device=device)
    ring = RingStep(NOTHING, Leading(number[:0]), number[None])

    inputs = PartInputs(q, new, of_stores(*slots)._replace(scratch=slots), t, Scoring())

    def both(run: Kernels) -> list[Partial]:
        return [
            run.causal(inputs),
            run.shared_rings(inputs, ring),
        ]

    def attend(run: Kernels) -> Partial:
        return merge(*both(run))

    lse = log_sum_exp(both(reference), None)
    token = torch.arange(length, dtype=torch.int32, device=device)[None]
    rows = (torch.full((1,), each, dtype=torch.int32, device=device) for each in (0, start, length))
    chunk = ChunkStep(*rows, token)

    def sums(run: Kernels) -> Weighed:
        return Weighed(None, run.column_sums(inputs, lse, slots.k, chunk, None))

    pairs = visible_pairs(length, None) + length * num_slots
    flops = 4 * pairs * heads.num_kv * heads.group * heads.dim
    num_bytes = 2 * (length + num_slots) * heads.num_kv * heads.dim * dtype.itemsize
    name = f"{model.name}, a chunk of {length} on {num_slots} slots"
    ours, notes = _methods(CHUNK, attend, device)
    yield Case(name, ours, num_bytes, flops, notes=notes)
    ours, notes = _methods(CHUNK_SUMS, sums, device)
    yield Case(name, ours, num_bytes // 2, flops // 2, notes=notes)
