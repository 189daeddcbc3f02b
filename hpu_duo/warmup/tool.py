"""Warm an engine up: estimate, compare with the budget, capture, measure, write the manifest."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from graphs import BatchShape, BucketTable, MissPolicy, Phase
from graphs.manifest import GraphRecord, Manifest, write_manifest
from hpu_duo.engine.engine import Engine
from hpu_duo.garbage import collector_paused
from hpu_duo.warmup.configuration import configuration_of, versions_of
from hpu_duo.warmup.estimate import Estimate, GraphCosts, WarmUpBudget, estimate_of
from hpu_duo.warmup.selection import check_holds_everything, select
from hpu_duo.warmup.tables import check_unchanged, digest_tables

Progress: TypeAlias = Callable[[int, int, GraphRecord], None]
"""Called after each graph with (done, total, its record)."""


class WarmUpStoppedError(ValueError):
    """A warm-up ended before all graphs were captured; those that were stay captured."""


@dataclass(frozen=True)
class WarmUpReport:
    """Result of a warm-up.

    Attributes:
        estimate: made before the start.
        records: the graphs in order; those that had been captured before have no costs.
        num_captured: graphs that were captured now.
        seconds: of the whole warm-up, tables and sampling included.
        is_dry_run: whether only the estimate was made.
        notes: sentences for the user.
    """

    estimate: Estimate
    records: tuple[GraphRecord, ...]
    num_captured: int
    seconds: float
    is_dry_run: bool
    notes: tuple[str, ...] = ()


class WarmUp:
    """A warm-up of an engine's table, prepared and checked; ``run`` does it.

    Args:
        engine: the engine whose buckets are captured.
        table: replaces the engine's buckets, none of which may have been captured.
        on_miss: policy for shapes that the table does not hold; None = the engine's.
        budget: bounds on the warm-up.
        phases: capture the buckets of these only; None = all.
        earlier: an earlier warm-up, whose measurements go into the estimate. It must be of this
            configuration, and its measurements count only if they were made with this software.
        compile_only: build graphs without launching them, on devices that can. Steps of padding are launched
            before, one for each phase, to fill tables that are filled at their first use.

    Raises:
        ValueError: the table lacks a reachable shape and a miss would be an error, a phase has no bucket,
            ``earlier`` is of another configuration, or the device has no compile-only mode.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        table: BucketTable | None = None,
        on_miss: MissPolicy | None = None,
        budget: WarmUpBudget | None = None,
        phases: Collection[Phase] | None = None,
        earlier: Manifest | None = None,
        compile_only: bool = False,
    ) -> None:
        self._engine, self._runner = engine, engine.runner
        self._budget = budget or WarmUpBudget()
        self._compile_only = compile_only
        self._configuration = configuration_of(engine)
        self._versions = versions_of(self._runner.runtime)
        self.notes: tuple[str, ...] = ()
        self.backend = self._runner.graphs.backend.name
        measured = self._checked(earlier)
        graphs = self._runner.graphs
        self._is_new_table = table is not None and table.buckets != graphs.table.buckets
        self._table = table if table is not None and self._is_new_table else graphs.table
        self._on_miss = graphs.policy if on_miss is None else on_miss
        if len(self._table):
            self._check_table()
        self.buckets = select(self._table, phases)
        if compile_only:
            self._runner.runtime.compile_only()
        self.estimate = estimate_of(self.buckets, GraphCosts.of(engine), self._count_routes(), measured)
        self._costs: dict[BatchShape, GraphRecord] = {
            record.shape: record for record in (measured.graphs if measured is not None else ())
        }

    def run(self, progress: Progress | None = None, manifest: str | Path | None = None) -> WarmUpReport:
        """Capture the buckets, the most expensive first; those captured before are left alone.

        Steps of other threads wait until it has ended.

        Args:
            progress: called after each graph.
            manifest: file to write, anew after each graph and always whole, so that it can be read whatever
                ends the warm-up.

        Raises:
            ValueError: the budget may be exceeded, or a manifest would be empty. Nothing has been done then.
            WarmUpStoppedError: the manifest cannot be written, memory does not suffice, or time or memory of
                the budget are used up before all graphs are captured.
            RuntimeError: a table was filled or changed in compile-only mode.
        """
        with self._engine.exclusive():
            return self._run(progress, manifest)

    def _run(self, progress: Progress | None, manifest: str | Path | None) -> WarmUpReport:
        self._budget.check(self.estimate)
        if manifest is not None and not len(self._table):
            raise ValueError("a manifest is of a table, and steps run at their exact shapes here")
        began, held = time.perf_counter(), self._runner.runtime.used_bytes()
        records: list[GraphRecord] = []
        num_captured = 0
        if self._is_new_table:
            self._runner.set_table(self._table, self._on_miss)
        if manifest is not None:
            self._write(manifest)
        self._fill_tables()
        before = digest_tables(self._runner.model.model) if self._compile_only else {}
        for done, bucket in enumerate(self.buckets, start=1):
            self._check_spent(time.perf_counter() - began, self._runner.runtime.used_bytes() - held, done - 1)
            record, is_new = self._capture(bucket, done)
            records.append(record)
            if is_new:
                num_captured += 1
                self._costs[bucket] = record
                if manifest is not None:
                    self._write(manifest)
            if progress is not None:
                progress(done, len(self.buckets), record)
        if self._compile_only:
            check_unchanged(before, digest_tables(self._runner.model.model))
        self._runner.warmup.finish(self.buckets)
        seconds = time.perf_counter() - began
        return WarmUpReport(self.estimate, tuple(records), num_captured, seconds, False, self.notes)

    def dry_run(self) -> WarmUpReport:
        """Return the estimate, and do nothing else.

        Raises:
            ValueError: the budget may be exceeded.
        """
        self._budget.check(self.estimate)
        return WarmUpReport(self.estimate, (), 0, 0.0, True, self.notes)

    def _checked(self, earlier: Manifest | None) -> Manifest | None:
        """Return the earlier manifest if its costs apply here."""
        if earlier is None:
            return None
        earlier.check(self._configuration, self._versions)
        others = earlier.differing_versions(self._versions)
        if others:
            self._note(f"the manifest's costs are of other software and are not used: {'; '.join(others)}")
            return None
        return earlier

    def _check_table(self) -> None:
        try:
            check_holds_everything(self._table, self._engine.scheduler.limits)
        except ValueError as error:
            if self._on_miss is MissPolicy.ERROR:
                raise
            self._note(str(error))

    def _note(self, sentence: str) -> None:
        self.notes = (*self.notes, sentence)

    def _count_routes(self) -> int:
        buckets = {bucket.num_logits: bucket for bucket in self.buckets}
        return sum(len(self._runner.warmup.routes(bucket)) for bucket in buckets.values())

    def _fill_tables(self) -> None:
        """Launch an uncaptured step of padding for each phase, the cheapest of it."""
        cheapest = {bucket.phase: bucket for bucket in self.buckets}
        for bucket in cheapest.values():
            self._runner.warmup.touch(bucket)
        self._runner.runtime.synchronize()

    def _capture(self, bucket: BatchShape, number: int) -> tuple[GraphRecord, bool]:
        runtime = self._runner.runtime
        held, began = runtime.used_bytes(), time.perf_counter()
        try:
            # For one graph at a time, so that what a compiler leaves behind is found between them.
            with runtime.compile_only() if self._compile_only else nullcontext(), collector_paused():
                is_new = self._runner.warmup.capture(bucket)
                runtime.synchronize()
        except torch.OutOfMemoryError as error:
            raise WarmUpStoppedError(
                f"out of memory at graph {number} of {len(self.buckets)}, {bucket}, the largest first: "
                f"expected {self.estimate.graphs[number - 1].num_bytes} bytes to suffice; lower num_blocks "
                "or kv_cache_bytes, or plan a smaller table"
            ) from error
        seconds = time.perf_counter() - began
        if not is_new:
            return self._costs.get(bucket, GraphRecord(bucket)), False
        return GraphRecord(bucket, seconds, runtime.used_bytes() - held), True

    def _check_spent(self, elapsed: float, grown: int, num_done: int) -> None:
        """Stop between two graphs once the budget is used up, although the estimate was within it."""
        done = f"for {num_done} of {len(self.buckets)} graphs"
        seconds, gib = self._budget.max_seconds, self._budget.max_gib
        if seconds is not None and elapsed > seconds:
            raise WarmUpStoppedError(
                f"the warm-up has used up its budget: {elapsed:.1f} s {done}, expected at most {seconds:g} s"
            )
        if gib is not None and grown > gib * (1 << 30):
            raise WarmUpStoppedError(
                f"the warm-up has used up its budget: {grown / (1 << 30):.3f} GiB {done}, expected at most "
                f"{gib:g} GiB"
            )

    def _write(self, path: str | Path) -> None:
        largest_first = reversed(self._table.by_cost)
        records = tuple(self._costs.get(bucket, GraphRecord(bucket)) for bucket in largest_first)
        try:
            write_manifest(path, Manifest(self._configuration, self._versions, records, self._table.promise))
        except ValueError as error:
            raise WarmUpStoppedError(str(error)) from error
