"""Decodes against stores of codes, beside the same decodes against floats of 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_suite import cases
from benchmarks.gpu_suite.cases import Heads, Layout, RowSize
from benchmarks.gpu_suite.kernel_cases import REFERENCE, SPLIT, STREAM_K, Case, choose_here, run_unique
from benchmarks.gpu_suite.shapes import Sizes
from kernels_ref import Blocks, KVUnits, Scoring, UnitLayout, reference
from kernels_ref.formats import format_of
from kernels_ref.step import PartInputs
from kernels_ref.triton import availability
from kernels_ref.units import Encoding, units_of

SECTION = "formats"
PLAIN = "auto"
FORMATS = (PLAIN, "int8_per_token_head", "fp8_per_token_head", "k8v4", "int4_per_token_head")


def make_format_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """A case for each format and batch, one at a time."""
    model = sizes.models[-1]
    heads = Heads(model.num_kv_heads, model.group_size, model.head_dim)
    for contexts in sizes.format_contexts:
        rows = [RowSize(context - 1, 1) for context in contexts]
        layout = cases.lay_out(rows, sizes.block_size, device, heads=heads)
        q = cases.queries(len(contexts), heads, dtype, device)
        for name in FORMATS:
            yield _case(f"{len(contexts)} x {contexts[0]}", name, layout, q, sizes.block_size)


def _case(batch: str, name: str, layout: Layout, q: torch.Tensor, block_size: int) -> Case:
    units = _units(name, layout, q, block_size)
    inputs = PartInputs(q, cases.NO_KV, units, layout.tensors, Scoring())
    works = {
        SPLIT: partial(run_unique, "split", inputs, layout),
        STREAM_K: partial(run_unique, "stream_k", inputs, layout),
    }
    problem = availability.problem(q.device)
    portable = {REFERENCE: partial(reference.unique_blocks, inputs, layout.plans[Blocks()])}
    num_tokens = layout.num_blocks * block_size
    size = units.encoding.format.token_bytes(q.shape[-1], q.shape[-1], q.dtype.itemsize)
    return Case(
        f"{batch}, {name}",
        portable if problem is not None else {**portable, **works},
        num_bytes=num_tokens * q.shape[1] * size,
        flops=4 * num_tokens * q.shape[1] * q.shape[2] * q.shape[3],
        chosen=choose_here(q, layout, reads_codes=name != PLAIN),
        notes={} if problem is None else dict.fromkeys(works, problem),
    )


def _units(name: str, layout: Layout, q: torch.Tensor, block_size: int) -> KVUnits:
    kv_format, dim = format_of(name), q.shape[-1]
    places = UnitLayout.dense(layout.num_blocks + 1, q.shape[1], block_size)
    shape = (places.num_units * places.unit_stride, dim)
    k, v = (cases.random(shape, q.dtype, q.device, seed) for seed in (2, 3))
    stored = (*kv_format.keys.encode(k), *kv_format.values.encode(v))
    return units_of(stored, places, Encoding(kv_format, dim, dim, q.dtype))
