"""Inputs of one part at a given size, laid out by the engine's own host plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from bias_builders import StepRows, Window
from hpu_duo.engine.batch import StepGeometry, fill, flatten
from kernels_ref import (
    Blocks,
    GroupKind,
    NewKV,
    Rings,
    Step,
    StepParts,
    StepTensors,
    UnitLayout,
    prepare_step,
)

NOTHING = torch.zeros(0, dtype=torch.int32)
NO_KV = NewKV(NOTHING, NOTHING)
NO_PLAN = StepTensors(*[NOTHING] * len(StepTensors._fields))
"""Inputs that a part does not read."""


class RowSize(NamedTuple):
    """A row of a step: tokens stored before it, and new ones."""

    start: int
    num_new: int


@dataclass(frozen=True)
class Heads:
    """Heads of one part: key/value heads, query heads of each, and their size."""

    num_kv: int
    group: int
    dim: int


@dataclass(frozen=True)
class Layout:
    """A step whose rows hold blocks in turn, as requests do that grew side by side.

    Attributes:
        num_blocks: blocks in the store, without the null block.
        step: prepared, on the device.
        plans: what each kind of head group has derived from it.
    """

    num_blocks: int
    step: Step
    plans: dict[GroupKind, Any]

    @property
    def tensors(self) -> StepTensors:
        """The plan."""
        return self.step.tensors


def lay_out(
    sizes: Sequence[RowSize],
    block_size: int,
    device: torch.device,
    *,
    heads: Heads,
    window: Window | None = None,
) -> Layout:
    """Plan a step of the given rows; with a window, for streaming heads as well."""
    need = [-(-(row.start + row.num_new) // block_size) for row in sizes]
    tables = _in_turn(need)
    rows = StepRows(
        row_id=np.arange(len(sizes), dtype=np.int32),
        start=np.array([row.start for row in sizes], np.int32),
        num_new=np.array([row.num_new for row in sizes], np.int32),
        block_ids=np.concatenate(tables),
        num_blocks=np.array(need, np.int32),
    )
    batch = flatten(rows, np.zeros(int(rows.num_new.sum()), np.int32), block_size)
    geometry = StepGeometry(block_size, sum(need), len(sizes), max_chunk_rows=len(sizes))
    host = {name: np.zeros(shape, np.int32) for name, shape in geometry.field_shapes(batch.shape).items()}
    fill(host, batch, batch.shape, geometry)
    tensors = StepTensors(**{name: torch.from_numpy(host[name]).to(device) for name in StepTensors._fields})
    phase = batch.shape.phase
    stores: dict[GroupKind, tuple[UnitLayout, ...]] = {
        Blocks(): (UnitLayout.dense(sum(need) + 1, heads.num_kv, block_size),)
    }
    if window is not None:
        stores[Rings(window)] = (ring_layout(len(sizes), window, heads),)
    step = prepare_step(
        StepParts(phase.causal, phase.shared, phase.unique),
        tensors,
        decode_len=1,
        stores=stores,
    )
    return Layout(sum(need), step, {kind: step.plans[kind.key, layout] for kind, (layout,) in stores.items()})


def ring_layout(num_rows: int, window: Window, heads: Heads) -> UnitLayout:
    """Layout of the rings of ``num_rows`` rows and of the null row."""
    return UnitLayout.dense(num_rows + 1, heads.num_kv, window.size)


def _in_turn(need: Sequence[int]) -> list[np.ndarray]:
    """Block ids of every row: block 0 of all rows, block 1 of all rows that have one, and so on."""
    tables: list[list[int]] = [[] for _ in need]
    free = 0
    for ordinal in range(max(need)):
        for row, count in enumerate(need):
            if ordinal < count:
                tables[row].append(free)
                free += 1
    return [np.array(table, np.int32) for table in tables]


def random(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Normal numbers, made where they are used."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(tuple(shape), dtype=dtype, device=device).normal_(generator=generator)


def queries(num: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Scaled queries ``[num, K, G, D]``."""
    return random((num, heads.num_kv, heads.group, heads.dim), dtype, device, 1) * heads.dim**-0.5


def as_keys(store_XKBD: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Dense keys or values ``[1, K, T, D]`` of blocks that lie in order."""
    return store_XKBD.transpose(0, 1).flatten(1, 2)[None, :, :num_tokens]
