"""Counters and records of steps, statistics of heads with a budget or a rule, and a sample of shapes.

An error here never fails a step.
"""

from __future__ import annotations

import logging
import os
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from bias_builders import Quest, Rule, Tile, TopBlocks
from graphs import BatchShape, BucketTable, Phase, StepLimits
from graphs.bucket_file import write_shapes
from graphs.prices import price, to_levels
from graphs.table import ShapeReservoir
from hpu_duo.kv.plan import SparseKind
from kernels_ref import Budget, ChosenBlocks, QuestBlocks

if TYPE_CHECKING:
    from graphs.bucket_file import ShapeRecorder
    from hpu_duo.engine.step_input import StepInput, StepResult
    from hpu_duo.engine.step_plan import StepPlan
    from hpu_duo.kv.allocations import KVAllocations
    from hpu_duo.kv.plan import LayerKV, MemoryPlan
    from kernels_ref import HeadGroup


@dataclass(frozen=True)
class BudgetStats:
    """Statistics of the heads with one kind of budget, over all ranks.

    Attributes:
        policy: name of the policy.
        num_slots: tokens that a head stores of a request.
        chunk: positions between the places at which heads evict tokens of a prompt.
        num_heads: KV heads with the budget, of all layers; replicas on other ranks count too.
        num_evictions: tokens that heads have evicted so far, one for each head.
        bytes_per_request: keys, values, positions and scores of a request.
        held_bytes: of all running requests.
    """

    policy: str
    num_slots: int
    chunk: int
    num_heads: int
    num_evictions: int
    bytes_per_request: int
    held_bytes: int

    @classmethod
    def of(
        cls, num_evicted_tokens: Mapping[int, int], allocations: KVAllocations, memory: MemoryPlan
    ) -> tuple[BudgetStats, ...]:
        """Collect one of each kind.

        Args:
            num_evicted_tokens: tokens that one head has evicted, by its budget.
        """
        groups: dict[Budget, list[tuple[LayerKV, HeadGroup]]] = {}
        for layer, group, kind in budgets_of(memory):
            groups.setdefault(kind, []).append((layer, group))
        return tuple(
            cls._of_kind(
                kind, found, num_evicted_tokens.get(kind.budget, 0), allocations.rows.num_used, memory
            )
            for kind, found in groups.items()
        )

    @classmethod
    def _of_kind(
        cls,
        kind: Budget,
        found: Sequence[tuple[LayerKV, HeadGroup]],
        num_evicted_tokens: int,
        num_rows: int,
        memory: MemoryPlan,
    ) -> BudgetStats:
        row_bytes = sum(
            kind.unit_bytes(
                group.num_heads, memory.token_bytes(layer, group) + kind.state_bytes, memory.block_size
            )
            for layer, group in found
        )
        num_heads = sum(group.num_heads for _, group in found)
        return cls(
            policy=kind.policy.name,
            num_slots=kind.budget,
            chunk=kind.chunk,
            num_heads=num_heads,
            num_evictions=num_evicted_tokens * num_heads,
            bytes_per_request=row_bytes,
            held_bytes=num_rows * row_bytes,
        )


def budgets_of(memory: MemoryPlan) -> Iterator[tuple[LayerKV, HeadGroup, Budget]]:
    """Yield the groups of heads with a budget, of all ranks, with their layer and kind."""
    for layer in memory.layers_of_ranks:
        for group in layer.own_groups:
            if isinstance(group.kind, Budget):
                yield layer, group, group.kind


def num_evicted_tokens(plan: StepPlan, memory: MemoryPlan) -> Counter[int]:
    """Tokens that each head with a budget evicts in a step, those beyond it, by its budget."""
    return Counter(
        {
            slots: sum(max(0, row.end - slots) - max(0, row.start - slots) for row in plan.rows)
            for slots in memory.budgets
        }
    )


TILE = 128
"""Queries and keys per side of a counted tile."""


@dataclass(frozen=True)
class TileCounts:
    """Tiles of one head, 128 queries by 128 keys, or block by block for chosen blocks; may be added.

    Attributes:
        num_tiles: tiles in which the rule shows something, or that are chosen.
        num_dense_tiles: tiles of dense attention.
    """

    num_tiles: int = 0
    num_dense_tiles: int = 0

    def plus(self, other: TileCounts) -> TileCounts:
        """Add counts."""
        return TileCounts(self.num_tiles + other.num_tiles, self.num_dense_tiles + other.num_dense_tiles)


@dataclass(frozen=True)
class RuleStats:
    """Statistics of the heads with one rule, or one choice of blocks.

    Attributes:
        rule: as text.
        num_heads: KV heads with the rule, of all layers.
        tiles: of all steps so far, of one of these heads.
    """

    rule: str
    num_heads: int
    tiles: TileCounts

    @classmethod
    def all_of(cls, tiles: Mapping[SparseKind, TileCounts], memory: MemoryPlan) -> tuple[RuleStats, ...]:
        """Collect those of each kind of heads, in the order of the heads."""
        return tuple(
            cls(kind.describe(), num_heads, tiles.get(kind, TileCounts()))
            for kind, num_heads in memory.sparse_heads.items()
        )


def add_tiles(tiles: dict[SparseKind, TileCounts], plan: StepPlan, memory: MemoryPlan) -> None:
    """Add the tiles of a step for each kind. The query of a decode counts as a tile of queries."""
    for kind in memory.sparse_heads:
        for row in plan.rows:
            if isinstance(kind, ChosenBlocks):
                counts = count_chosen(kind.choice, row.start, row.end, memory.block_size)
            elif isinstance(kind, QuestBlocks):
                counts = count_pages(kind.choice, row.start, row.end, memory.block_size)
            else:
                assert kind.rule is not None, "heads without a rule are not sparse"
                counts = count_tiles(kind.rule, row.start, row.end)
            tiles[kind] = tiles.get(kind, TileCounts()).plus(counts)


def count_chosen(choice: TopBlocks, start: int, end: int, block_size: int) -> TileCounts:
    """Count the blocks that tokens ``[start, end)`` of a request attend to, tile by tile, their own included.

    Tokens of a partial tile, as decodes, attend to all blocks.
    """
    numbers = np.arange(start // block_size, -(-end // block_size))
    is_whole = (numbers * block_size >= start) & ((numbers + 1) * block_size <= end)
    dense = numbers + 1
    seen = np.where(is_whole, np.minimum(dense, choice.num_blocks), dense)
    return TileCounts(int(seen.sum()), int(dense.sum()))


def count_pages(choice: Quest, start: int, end: int, block_size: int) -> TileCounts:
    """Count the blocks that tokens ``[start, end)`` of a request read, as ``count_chosen`` does.

    One token is a decode, several are a chunk of a prompt.
    """
    dense = np.arange(start // block_size, -(-end // block_size)) + 1
    seen = np.minimum(dense, choice.num_pages) if end - start == 1 else dense
    return TileCounts(int(seen.sum()), int(dense.sum()))


def count_tiles(rule: Rule, start: int, end: int) -> TileCounts:
    """Count the tiles in which tokens ``[start, end)`` of a request attend to the tokens before them."""
    first_query = np.arange(start - start % TILE, end, TILE)[:, None]
    first_key = np.arange(0, end, TILE)[None]
    tile = Tile(
        np.maximum(first_query, start),
        np.minimum(first_query + TILE, end) - 1,
        first_key,
        np.minimum(first_key + TILE, end) - 1,
    )
    return TileCounts(int(np.sum(rule.may_see(tile))), int(np.sum(tile.has_past)))


_log = logging.getLogger(__name__)


@dataclass
class StepCounters:
    """Running totals; the engine is their only writer."""

    steps: Counter[Phase] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_padded_tokens: int = 0
    num_query_tokens: int = 0
    num_preemptions: int = 0
    num_unrecorded_steps: int = 0
    num_evicted_tokens: Counter[int] = field(default_factory=Counter)
    tiles: dict[SparseKind, TileCounts] = field(default_factory=dict)
    peak_cached_tokens: int = 0
    peak_held_bytes: int = 0
    peak_unshared_bytes: int = 0
    host_s: float = 0.0
    device_s: float = 0.0

    def count(
        self, plan: StepPlan, result: StepResult, allocations: KVAllocations, memory: MemoryPlan
    ) -> None:
        """Count a completed step, before anything of it is released."""
        shape, bucket = result.message.shape, result.message.bucket
        self.steps[shape.phase] += 1
        cached = num_blocks = 0
        for row in plan.rows:
            end = row.end
            cached += end
            num_blocks += -(-end // memory.block_size)
            known = row.request.num_prompt_tokens
            if row.start < known:
                self.num_prompt_tokens += min(end, known) - row.start
        self.num_query_tokens += bucket.query_len
        self.num_padded_tokens += bucket.query_len - shape.query_len
        self.num_preemptions += len(plan.preempted)
        self.device_s += result.device_s
        if memory.budgets:
            self.num_evicted_tokens.update(num_evicted_tokens(plan, memory))
        if memory.sparse_heads:
            add_tiles(self.tiles, plan, memory)
        if cached >= self.peak_cached_tokens:
            self.peak_cached_tokens = cached
            self.peak_held_bytes = held_bytes(allocations, memory)
            self.peak_unshared_bytes = num_blocks * memory.block_bytes + len(plan.rows) * memory.row_bytes


def held_bytes(allocations: KVAllocations, memory: MemoryPlan) -> int:
    """Bytes of the allocated blocks and rows, on the host too; shared blocks count once."""
    host = allocations.host
    num_blocks = allocations.blocks.num_used + (0 if host is None else host.num_used)
    return num_blocks * memory.block_bytes + allocations.rows.num_used * memory.row_bytes


class StepSink(Protocol):
    """A recorder of steps, such as ``startup.recorded_steps.StepRecorder``."""

    def add(self, message: StepInput, token_ids: npt.NDArray[np.int32]) -> None:
        """Record a completed step, and the tokens of ``message.sampled``."""
        ...


class StepListener(Protocol):
    """An object that is notified of every step, such as ``hpu_duo.lab.step_profiler.StepProfiler``."""

    def stepped(self) -> None:
        """Called after a step, in the thread that ran it."""
        ...


class Telemetry:
    """Counts steps and records their shapes.

    Attributes:
        counters: running totals.
        shapes: a sample of the shapes of steps, and their padding.
        recorder: of the exact shape of every step, or None.
        step_recorder: of every step, or None.
        profiler: notified of every step, or None.
    """

    def __init__(self, shapes: ShapeWatch) -> None:
        self.counters, self.shapes = StepCounters(), shapes
        self.recorder: ShapeRecorder | None = None
        self.step_recorder: StepSink | None = None
        self.profiler: StepListener | None = None

    def note(
        self, plan: StepPlan, result: StepResult, allocations: KVAllocations, memory: MemoryPlan
    ) -> None:
        """Count a completed step, before anything of it is released.

        Errors, such as of a full disk, are counted, and the first one is logged.
        """
        shape, bucket = result.message.shape, result.message.bucket
        is_noted = self._try(partial(self.counters.count, plan, result, allocations, memory))
        is_noted &= self._try(partial(self.shapes.add, shape, bucket))
        if self.recorder is not None:
            is_noted &= self._try(partial(self.recorder.add, shape))
        if self.step_recorder is not None:
            is_noted &= self._try(partial(self.step_recorder.add, result.message, result.token_ids))
        # Last, so that the profile of a step includes its recording.
        if self.profiler is not None:
            is_noted &= self._try(self.profiler.stepped)
        self.counters.num_unrecorded_steps += not is_noted

    def _try(self, note: Callable[[], None]) -> bool:
        """Call ``note``; returns whether it succeeded."""
        try:
            note()
        except Exception as error:
            if not self.counters.num_unrecorded_steps:
                _log.warning("cannot record a step, which is served nevertheless: %s", error)
            return False
        return True


WINDOW = 2048
"""Number of steps in a window."""

_TIMES, _MORE = 2.0, 0.1


@dataclass(frozen=True)
class Drift:
    """Padding far beyond what the bucket table was planned for.

    Attributes:
        promised, seen: mean cost of padded steps over that of exact ones, minus 1: of the traffic that the
            table was planned for, and of a window of steps.
        num_steps: size of the window.
        command: the command that plans another table from the shapes of recent steps.
    """

    promised: float
    seen: float
    num_steps: int
    command: str

    def __str__(self) -> str:
        return (
            f"the last {self.num_steps:,} steps pad {self.seen:.0%}, and their bucket table promises "
            f"{self.promised:.0%}: it was planned for other traffic. To plan for this one: {self.command}"
        )


@dataclass(frozen=True)
class Replanning:
    """The command that plans a new table.

    Attributes:
        model: directory of the model.
        limits: of the engine.
    """

    model: str
    limits: StepLimits

    def command(self, num_graphs: int, recording: Path) -> str:
        """The command line, for a table of as many graphs and the shapes in a file."""
        limits = self.limits
        options = {
            "--model": self.model,
            "--max-num-seqs": limits.max_num_seqs,
            "--max-num-batched-tokens": limits.max_num_batched_tokens,
            "--max-model-len": limits.max_model_len,
            "--max-chunk-rows": limits.max_chunk_rows,
            "--decode-len": limits.decode_len,
            "--block-size": limits.block_size,
            "--num-blocks": limits.num_blocks,
            "--graphs-budget": num_graphs,
            "--from-shapes": recording,
            "--out": "table.txt",
        }
        words = (word for option in options.items() for word in map(str, option))
        return shlex.join(["hpu-duo", "plan", *words])


class ShapeWatch:
    """Samples the shapes of steps, and warns once when padding far exceeds that of the planned traffic.

    Args:
        table: the current table; one that was not planned has no planned padding.
        replanning: the command that plans another one.
        num_judged: number of steps in a window.

    Attributes:
        num_judged: number of steps in a window; may be changed before the first step.
        reservoir: the sample.
        recording: file that all shapes are written to; None writes the sample to a temporary file with the
            warning.
        drift: what the warning reported; None without a warning.
    """

    def __init__(
        self,
        table: Callable[[], BucketTable],
        replanning: Replanning,
        num_judged: int = WINDOW,
    ) -> None:
        self.reservoir = ShapeReservoir()
        self.recording: Path | None = None
        self.drift: Drift | None = None
        self._table, self._replanning = table, replanning
        self.num_judged = num_judged
        self._window: list[tuple[BatchShape, BatchShape]] = []

    def add(self, shape: BatchShape, bucket: BatchShape) -> None:
        """Count a step and the bucket that it was padded to."""
        self.reservoir.add(shape)
        if self.drift is None:
            self._window.append((shape, bucket))
            if len(self._window) == self.num_judged:
                window, self._window = self._window, []
                self._judge(window)

    def restart(self) -> None:
        """Judge another table: compare steps from now on with its planned padding."""
        self._window.clear()
        self.drift = None

    def _judge(self, window: list[tuple[BatchShape, BatchShape]]) -> None:
        table = self._table()
        planned_padding, cost = table.planned_padding, table.cost
        if planned_padding is None or not planned_padding.is_by(cost):
            return
        exact, padded = (price(cost, to_levels(shapes)).sum() for shapes in zip(*window))
        seen = float(padded / exact) - 1
        if seen > _TIMES * planned_padding.padding + _MORE:
            command = self._replanning.command(len(table), self.recording or self._write())
            self.drift = Drift(planned_padding.padding, seen, len(window), command)
            _log.warning("%s", self.drift)

    def _write(self) -> Path:
        descriptor, name = tempfile.mkstemp(prefix="hpu-duo-shapes-", suffix=".jsonl")
        os.close(descriptor)
        write_shapes(name, self.reservoir.counts())
        return Path(name)
