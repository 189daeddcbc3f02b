"""Random steps with known history, and the dense answer to compare with.

The oracle knows nothing of parts, blocks or rings: each row is a list of keys, and a double loop
over queries applies the token rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from bias_builders import Rule, StepRows, Window
from graphs.shape import BatchShape, Phase
from hpu_duo.engine.batch import StepGeometry, fill, flatten
from kernels_ref import (
    Blocks,
    HeadGroup,
    Implementation,
    KVUnits,
    LayerSpec,
    Rings,
    Scratch,
    Softmax,
    StepParts,
    StepTensors,
    UnitLayout,
    as_units,
    copy_to_scratch,
    prepare_step,
    stores_of,
)
from kernels_ref.groups import BlockStep, RingStep
from tests.bias_builders.plain_rules import plain


@dataclass(frozen=True)
class RowSpec:
    """A row: how much is stored, how much is new, and how many leading blocks it shares with row 0.

    ``ahead`` tokens more than ``start`` were stored before and have been taken back.
    """

    start: int
    num_new: int
    shared_blocks: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class Scenario:
    rows: tuple[RowSpec, ...]
    block_size: int
    window: Window
    kr: int
    ks: int
    group: int
    head_dim: int
    pad: tuple[int, int, int, int]  # extra Q, NS, NU, N
    all_parts: bool
    seed: int
    decode_len: int = 1
    slack: int = 0
    is_spread: bool = False  # stores with room between heads and units
    rule: Rule | None = None  # of the heads that keep blocks
    value_dim: int | None = None  # None: that of keys

    @property
    def dims(self) -> tuple[int, int]:
        """Elements of a key and of a value."""
        return self.head_dim, self.value_dim or self.head_dim


TWO_SIZES = (None, 5, 12)
"""Sizes of values that differ from those of keys, and None."""


@st.composite
def scenarios(draw: st.DrawFn, value_dims: tuple[int | None, ...] = (None,)) -> Scenario:
    block_size = draw(st.sampled_from([2, 4, 8]))
    decode_len = draw(st.sampled_from([1, 1, 2, block_size]))
    slack = decode_len - 1 + draw(st.integers(0, 3))
    start, shared, ahead = st.integers(0, 30), st.integers(0, 3), st.integers(0, slack)
    kind = st.one_of(
        st.builds(RowSpec, start, st.integers(1, decode_len), shared, ahead),
        st.builds(RowSpec, start, st.integers(2, 14), shared, ahead),
        st.builds(RowSpec, start=st.just(0), num_new=st.integers(1, 20)),
    )
    return Scenario(
        rows=tuple(draw(st.lists(kind, min_size=1, max_size=5))),
        block_size=block_size,
        window=Window(draw(st.integers(0, 5)), draw(st.integers(1, 9))),
        kr=draw(st.integers(0, 2)),
        ks=draw(st.integers(0, 2)),
        group=draw(st.sampled_from([1, 3])),
        head_dim=8,
        pad=tuple(draw(st.integers(0, 5)) for _ in range(4)),
        all_parts=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31 - 1)),
        decode_len=decode_len,
        slack=slack,
        is_spread=draw(st.booleans()),
        value_dim=draw(st.sampled_from(value_dims)),
    )


class World:
    """A scenario laid out in stores, every slot that nobody may read filled with NaN."""

    def __init__(self, scenario: Scenario, dtype: torch.dtype = torch.float32) -> None:
        self.s, s = scenario, scenario
        rng = np.random.default_rng(s.seed)
        self.gen = torch.Generator().manual_seed(s.seed)
        self.num_heads = (s.kr + s.ks) * s.group
        tables, self.num_blocks = self._tables(rng)
        self.max_rows = len(s.rows) + s.pad[3]
        row_id = rng.permutation(self.max_rows)[: len(s.rows)].astype(np.int32)
        self.rows = StepRows(
            row_id=row_id,
            start=np.array([r.start for r in s.rows], np.int32),
            num_new=np.array([r.num_new for r in s.rows], np.int32),
            block_ids=np.concatenate([np.array(t, np.int32) for t in tables])
            if s.kr
            else np.zeros(0, np.int32),
            num_blocks=np.array([len(t) if s.kr else 0 for t in tables], np.int32),
            decode_len=s.decode_len,
        )
        self.tables = tables
        self.keys, self.values = self._history(dtype)
        self.queries = torch.randn(
            int(self.rows.num_new.sum()), self.num_heads, s.head_dim, generator=self.gen
        ).to(dtype)
        self.blocks, self.rings = self._stores(dtype)
        self.groups = (
            *([HeadGroup(s.kr, Blocks(s.rule))] if s.kr else []),
            *([HeadGroup(s.ks, Rings(s.window, s.slack))] if s.ks else []),
        )
        self.cache = (*([self.blocks] if s.kr else []), *([self.rings] if s.ks else []))

    def _tables(self, rng: np.random.Generator) -> tuple[list[list[int]], int]:
        s = self.s
        need = [-(-(r.start + r.num_new) // s.block_size) for r in s.rows]
        pool = list(rng.permutation(sum(need) + 3))
        tables: list[list[int]] = []
        for row, count in zip(s.rows, need):
            whole = min(row.start, s.rows[0].start) // s.block_size
            shared = min(row.shared_blocks, whole) if tables else 0
            tables.append(
                tables[0][:shared] + [int(pool.pop()) for _ in range(count - shared)]
                if tables
                else [int(pool.pop()) for _ in range(count)]
            )
        return tables, sum(need) + 3

    def _history(self, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        s = self.s

        def random(row: RowSpec, dim: int) -> torch.Tensor:
            return torch.randn(row.start + row.num_new, s.kr + s.ks, dim, generator=self.gen).to(dtype)

        keys, values = ([random(r, dim) for r in s.rows] for dim in s.dims)
        for i, table in enumerate(self.tables):
            same = 0
            while i and same < min(len(table), len(self.tables[0])) and table[same] == self.tables[0][same]:
                same += 1
            for content in (keys, values):
                content[i][: same * s.block_size] = content[0][: same * s.block_size]
        return keys, values

    def _stores(self, dtype: torch.dtype) -> tuple[KVUnits, KVUnits]:
        s = self.s
        blocks = self._units(self.num_blocks + 1, s.kr, s.block_size, dtype)
        rings = self._units(self.max_rows + 1, s.ks, s.window.size + s.slack, dtype, len(s.rows) + 1)
        turning = s.window.recent + s.slack
        for i, row in enumerate(s.rows):
            table, ring = self.tables[i], int(self.rows.row_id[i])
            for which, content in enumerate((self.keys, self.values)):
                for p in range(row.start + row.ahead):
                    # Other tokens than those that come now have been where these will be.
                    vector = content[i][p] if p < row.start else -2 * content[i][p % len(content[i])]
                    if s.kr and p // s.block_size < len(table):
                        blocks.views[which][table[p // s.block_size], :, p % s.block_size] = vector[: s.kr]
                    slot = p if p < s.window.sink else s.window.sink + (p - s.window.sink) % turning
                    rings.views[which][ring, :, slot] = vector[s.kr :]
        return blocks, rings

    def _units(
        self, num_units: int, num_heads: int, num_slots: int, dtype: torch.dtype, copied: int = 0
    ) -> KVUnits:
        layout = UnitLayout.dense(num_units, num_heads, num_slots)
        if self.s.is_spread:
            stride = num_slots + 1
            layout = UnitLayout(num_units, num_heads, num_slots, stride, num_heads * stride + 3, 2)
        num_vectors = num_units * layout.unit_stride
        stores = (torch.full((num_vectors, dim), torch.nan, dtype=dtype) for dim in self.s.dims)
        if not copied:
            return as_units(*stores, layout)
        copies = (copied, num_heads, num_slots)
        scratch = Scratch(*(torch.full((*copies, dim), torch.nan, dtype=dtype) for dim in self.s.dims))
        return as_units(*stores, layout, scratch)

    def new(self, content: list[torch.Tensor], extra: int) -> torch.Tensor:
        """New tokens of all rows, then finite padding."""
        flat = torch.cat([c[r.start :] for c, r in zip(content, self.s.rows)])
        return torch.cat([flat, torch.full((extra, *flat.shape[1:]), 7.0, dtype=flat.dtype)])

    def spec(self, impl: object, softcap: float | None = None, softmax: Softmax = Softmax.EXACT) -> LayerSpec:
        s = self.s
        sizes = (s.group, s.head_dim, s.head_dim**-0.5)
        layer = LayerSpec(self.groups, *sizes, softcap, impl, softmax)  # type: ignore[arg-type]
        return replace(layer, value_head_dim=s.value_dim)

    def inputs(self, has_masks: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, object]:
        """Padded queries, keys, values and the prepared step."""
        s = self.s
        geometry = StepGeometry(
            s.block_size,
            self.num_blocks,
            self.max_rows,
            len(s.rows) + 1,
            s.decode_len,
            uses_block_positions=s.rule is not None,
        )
        batch = flatten(self.rows, np.zeros(int(self.rows.num_new.sum()), np.int32), s.block_size)
        exact = batch.shape
        phase = Phase(True, True, True) if s.all_parts else exact.phase
        bucket = BatchShape(
            phase,
            exact.query_len + s.pad[0],
            exact.num_shared_blocks + s.pad[1] * phase.shared,
            min(exact.num_unique_blocks + s.pad[2] * phase.unique, self.num_blocks),
            self.max_rows,
        )
        host = {k: np.full(shape, -99, np.int32) for k, shape in geometry.field_shapes(bucket).items()}
        fill(host, batch, bucket, geometry)
        assert all((array >= 0).all() for array in host.values()), "no index may be negative"
        tensors = StepTensors(**{k: torch.from_numpy(host[k]) for k in StepTensors._fields})
        if phase.causal and phase.shared:
            copy_to_scratch([self.cache], tensors.chunk_row)
        step = prepare_step(
            StepParts(phase.causal, phase.shared, phase.unique),
            tensors,
            decode_len=s.decode_len,
            stores=stores_of([self.spec(Implementation.REFERENCE)], [self.cache]),
            mask_dtype=self.queries.dtype if has_masks else None,
        )
        extra = s.pad[0]
        q = torch.cat(
            [self.queries, torch.full((extra, *self.queries.shape[1:]), 5.0, dtype=self.queries.dtype)]
        )
        return q, self.new(self.keys, extra), self.new(self.values, extra), step

    def plans(self, step: object) -> tuple[BlockStep, RingStep]:
        """Tensors that both kinds of groups have derived from a step."""
        keys = ((group.kind.key, units.layout) for group, units in zip(self.groups, self.cache))
        blocks, rings = (step.plans[key] for key in keys)  # type: ignore[attr-defined]
        return blocks, rings

    def sees(self, head: int, query: int, key: int) -> bool:
        """The token rule of a key/value head, written without the code under test."""
        if key > query:
            return False
        if head < self.s.kr:
            return self.s.rule is None or plain(self.s.rule, query, key)
        return key < self.s.window.sink or query - key < self.s.window.recent

    def dense(self, softcap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Expected output of the unpadded queries, float64 ``[Q, H, D]``."""
        s, flat = self.s, 0
        out = torch.zeros(*self.queries.shape[:2], s.dims[1], dtype=torch.float64)
        for i, row in enumerate(s.rows):
            for p in range(row.start, row.start + row.num_new):
                for h in range(self.num_heads):
                    kv = h // s.group
                    seen = [k for k in range(p + 1) if self.sees(kv, p, k)]
                    scores = (
                        self.keys[i][seen, kv].double() @ self.queries[flat, h].double() * s.head_dim**-0.5
                    )
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    if sinks is not None:
                        scores = torch.cat([scores, sinks[h : h + 1].double()])
                    weights = torch.softmax(scores, 0)[: len(seen)]
                    out[flat, h] = weights @ self.values[i][seen, kv].double()
                flat += 1
        return out
