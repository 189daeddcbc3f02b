"""Warm an engine up: estimate, compare with the budget, capture, measure, write the manifest."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import nn

from graphs import BatchShape, BucketTable, Miss, MissPolicy, Phase, StepCost, StepLimits
from graphs.bucket_file import read_shapes, read_table
from graphs.compile_cache import CompileCache
from graphs.manifest import GraphRecord, Manifest, is_manifest, read_manifest, write_manifest
from graphs.planner import GraphBudget
from hpu_duo.config.engine import EngineConfig
from hpu_duo.engine.engine import Engine
from hpu_duo.modeling.attention import AttentionLayer
from hpu_duo.modeling.packed_linear import PackedLinear, PanelLinear
from hpu_duo.modeling.quantised.panels import LAYERS_OF_CODES
from hpu_duo.planning.simulation import plan_buckets
from hpu_duo.startup.tables import default_table
from hpu_duo.startup.warm_up_estimate import (
    Estimate,
    GraphCosts,
    WarmUpBudget,
    configuration_of,
    estimate_of,
    known_before_loading,
    versions_of,
)
from hpu_duo.startup.warm_up_jobs import BucketQueue, Capturing, Jobs, JobTask, check_jobs


@dataclass(frozen=True)
class GivenBuckets:
    """A table of buckets, and its manifest, if any.

    Attributes:
        table: the buckets; None leaves the choice to the capture backend.
        manifest: of an earlier warm-up.
        own_cost: see ``GraphConfig``.
    """

    table: BucketTable | None
    manifest: Manifest | None = None
    own_cost: bool = True

    @classmethod
    def read(cls, buckets: BucketTable | str | Path | None, block_size: int) -> GivenBuckets:
        """Read ``buckets`` of ``from_pretrained``: a table, None, or the path of a table or manifest.

        Raises:
            ValueError: a file is neither a table nor a manifest.
        """
        if not isinstance(buckets, str | Path):
            return cls(buckets)
        cost = StepCost(block_size=block_size)
        if not is_manifest(buckets):
            return cls(read_table(buckets, cost), own_cost=False)
        manifest = read_manifest(buckets)
        return cls(manifest.table(cost), manifest, own_cost=False)

    def with_length(self, config: EngineConfig) -> EngineConfig:
        """Fill in the longest request with the manifest's, if it is open: "auto" settings depend on it."""
        length = None if self.manifest is None else self.manifest.configuration.get("limits.max_model_len")
        if config.scheduler.max_model_len is not None or not isinstance(length, int):
            return config
        return replace(config, scheduler=replace(config.scheduler, max_model_len=length))

    def complete(self, config: EngineConfig) -> EngineConfig:
        """Fill in the settings that a configuration leaves open with those of the manifest.

        The number of blocks, for example, would otherwise follow from the memory that happens to be free. The
        result also has the table in place of its file, and the cost function that ranks it.

        Raises:
            ValueError: a setting that is known before weights are read differs from the manifest's.
        """
        own_cost = self.own_cost and config.graph.own_cost
        config = replace(config, graph=replace(config.graph, table=self.table, own_cost=own_cost))
        if self.manifest is None:
            return config
        self.manifest.check(known_before_loading(config), {}, known_only=True)
        config = self.with_length(config)
        cache = config.cache
        num_blocks = self.manifest.configuration.get("limits.num_blocks")
        if cache.num_blocks is None and cache.kv_cache_bytes is None and num_blocks:
            cache = replace(cache, num_blocks=num_blocks)
        return replace(config, cache=cache)

    def check(self, engine: Engine) -> None:
        """Raise ValueError unless the manifest, if there is one, is for this engine."""
        if self.manifest is not None:
            self.manifest.check(configuration_of(engine), versions_of(engine.runner.runtime))


def parse_phases(text: str) -> tuple[Phase, ...]:
    """Read phase strings that are separated by commas, such as ``--u,cs-``, or their short forms ``u,cs``.

    Raises:
        ValueError: one of them is not a phase, or there is none.
    """
    phases: dict[Phase, None] = {}
    for part in text.split(","):
        try:
            phases[Phase.parse(part.strip())] = None
        except ValueError as error:
            raise ValueError(f"phases {text!r}: {error}") from error
    return tuple(phases)


def select(table: BucketTable, phases: Collection[Phase] | None) -> tuple[BatchShape, ...]:
    """Return the buckets of some phases, or of all, the most expensive first.

    The largest is first, so that a lack of memory is detected at once, and smaller graphs reuse its
    allocations.

    Raises:
        ValueError: the table has no bucket of one of the phases.
    """
    largest_first = tuple(reversed(table.by_cost))
    if phases is None:
        return largest_first
    present = {bucket.phase for bucket in table}
    for phase in phases:
        if phase not in present:
            listed = ", ".join(map(str, sorted(present))) or "no buckets"
            raise ValueError(f"expected phases that the table has, which are {listed}, got {phase}")
    return tuple(bucket for bucket in largest_first if bucket.phase in phases)


def check_holds_everything(table: BucketTable, limits: StepLimits) -> None:
    """Raise ValueError for a table without a bucket for a shape that the scheduler can produce.

    The largest shape of a phase holds every other shape of that phase, so a table has a bucket for every
    reachable shape exactly if it has one for the largest of each reachable phase.

    Raises:
        ValueError: it lacks one; the message names the shapes.
    """
    missing = [
        str(found.shape)
        for found in (table.fit(limits.largest_of(phase)) for phase in limits.reachable_phases)
        if isinstance(found, Miss)
    ]
    if missing:
        raise ValueError(
            f"the table lacks reachable shapes: within these limits steps can be as large as "
            f"{', '.join(missing)}, and no bucket holds {'it' if len(missing) == 1 else 'them'}; "
            "lower the limits, add buckets, or let misses run with on_miss 'capture' or 'eager'"
        )


Digests = Mapping[str, str]


def digest_tables(model: nn.Module) -> Digests:
    """Return a digest of each tensor of a model that is neither weight nor KV store, by its path."""
    return {name: _digest(tensor) for name, tensor in _tables(model)}


def check_unchanged(before: Digests, after: Digests) -> None:
    """Raise an error for tables that were created or changed between two digests.

    Raises:
        RuntimeError: a table was; the message names it.
    """
    touched = sorted(name for name in after if before.get(name) != after[name])
    if touched:
        raise RuntimeError(
            f"{', '.join(touched)}: filled or changed while nothing was launched, so their content is "
            "invalid, and so is this model's output from now on; load it again, and warm up without "
            "compile_only"
        )


def _tables(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        # Stores change in every step, and packed weights never do.
        if isinstance(module, _WITHOUT_TABLES):
            continue
        own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
        held = {**dict(module.named_buffers(recurse=False, remove_duplicate=False)), **own}
        for name, value in held.items():
            yield from _tensors(f"{path}.{name}" if path else name, value)


_WITHOUT_TABLES = (AttentionLayer, PackedLinear, PanelLinear, *LAYERS_OF_CODES)

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has, its parameters, buffers and children among them."""


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}[{index}]", item)


def _digest(tensor: torch.Tensor) -> str:
    host = tensor.detach().cpu().contiguous().flatten()
    content = host.view(torch.uint8).numpy().tobytes() if host.numel() else b""
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


Progress: TypeAlias = Callable[[int, int, GraphRecord], None]
"""Called after each graph with (done, total, its record)."""


class WarmUpStoppedError(ValueError):
    """A warm-up ended before all graphs were captured; those that were stay captured."""


@dataclass(frozen=True)
class WarmUpReport:
    """Result of a warm-up.

    Attributes:
        estimate: computed before the start.
        records: the graphs in order; those that had been captured before have no costs.
        num_captured: graphs that were captured now.
        seconds: of the whole warm-up, tables and sampling included.
        is_dry_run: whether only the estimate was computed.
        notes: sentences for the user.
        num_skipped: graphs whose code was in the compiler's cache on disk, and which were left out.
    """

    estimate: Estimate
    records: tuple[GraphRecord, ...]
    num_captured: int
    seconds: float
    is_dry_run: bool
    notes: tuple[str, ...] = ()
    num_skipped: int = 0

    @property
    def trace_s(self) -> float:
        """Seconds in which torch traced the graphs that were captured."""
        return sum(record.trace_s or 0.0 for record in self.records)


class WarmUp:
    """A warm-up of an engine's table, prepared and checked; ``run`` does it.

    Args:
        engine: of the buckets.
        table: replaces the engine's buckets, none of which may have been captured.
        on_miss: policy for shapes that fit no bucket; None = the engine's.
        budget: bounds on the warm-up.
        phases: capture the buckets of these only; None = all.
        earlier: an earlier warm-up, whose measurements go into the estimate. It must be of this
            configuration, and its measurements count only if they are of the same software.
        compile_only: build graphs without launching them, on devices that can. Steps of padding are launched
            before, one for each phase, to fill tables that are filled at their first use.
        resume: skip buckets whose code ``earlier`` has left in the compiler's cache on disk. They are not
            captured in this process, which is for one that only fills the cache.
        num_jobs: processes that compile buckets side by side, this one included. With ``resume`` this one
            leaves out what the others have compiled, else it captures that from the cache at the end.
        config: what ``engine`` was made from; needed for several jobs.

    Attributes:
        buckets: to capture, the most expensive first.
        skipped: buckets that ``resume`` leaves out.
        cache: the compiler's cache on disk; None of backends without one.
        notes: sentences for the user.
        backend: name of the capture backend.
        num_jobs: processes that capture, no more than there are buckets.
        estimate: of ``buckets``.

    Raises:
        ValueError: the table lacks a reachable shape and a miss would be an error, a phase has no bucket,
            ``earlier`` is of another configuration, the device has no compile-only mode, or the warm-up
            cannot be shared by so many jobs (``check_jobs``).
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
        resume: bool = False,
        num_jobs: int = 1,
        config: EngineConfig | None = None,
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
        if table is not None and engine.scheduler.limits.draft_lens:
            table = table.with_drafts(engine.scheduler.limits.draft_lens)
        self._is_new_table = table is not None and table.buckets != graphs.table.buckets
        self._table = table if table is not None and self._is_new_table else graphs.table
        self._on_miss = graphs.policy if on_miss is None else on_miss
        if len(self._table):
            self._check_table()
        self.cache = CompileCache.of(graphs.backend)
        self._capturing = Capturing(engine, self.cache, compile_only=compile_only)
        chosen = select(self._table, phases)
        self.skipped = self._in_cache(chosen, measured) if resume else ()
        self.buckets = tuple(bucket for bucket in chosen if bucket not in set(self.skipped))
        if compile_only:
            self._runner.runtime.compile_only()
        self._task: JobTask | None = None
        self._resume, self.num_jobs = resume, min(num_jobs, max(1, len(self.buckets)))
        if num_jobs != 1:
            if config is None:
                raise ValueError(f"expected the configuration of the engine for {num_jobs} jobs, got None")
            check_jobs(num_jobs, engine, config, self.cache)
            graphs_of = self._configuration
            self._task = JobTask.of(engine, config, self._table, graphs_of, compile_only=compile_only)
        self.estimate = estimate_of(
            self.buckets, GraphCosts.of(engine, self.buckets), self._count_routes(), measured
        )
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
        if self._is_new_table:
            self._runner.set_table(self._table, self._on_miss)
        if manifest is not None:
            self._write(manifest)
        self._capturing.fill_tables(self.buckets)
        before = digest_tables(self._runner.model.model) if self._compile_only else {}
        records: list[GraphRecord] = []
        new: list[GraphRecord] = []
        noting = Lock()

        def note(record: GraphRecord, is_new: bool = True) -> None:
            with noting:
                records.append(record)
                if is_new:
                    new.append(record)
                    self._costs[record.shape] = record
                    if manifest is not None:
                        self._write(manifest)
                if progress is not None:
                    progress(len(records), len(self.buckets), record)

        def check_spent(num_done: int) -> None:
            grown = self._runner.runtime.used_bytes() - held
            self._check_spent(time.perf_counter() - began, grown, num_done)

        queue = BucketQueue(self.buckets)
        with Jobs(self.num_jobs - 1, self._task, queue, note) as jobs:
            for bucket in queue:
                check_spent(len(records))
                note(*self._capture(bucket, self.buckets.index(bucket) + 1))
            self._wait(jobs)
        for number, record in enumerate(() if self._resume or self.num_jobs == 1 else records):
            check_spent(number)
            self._runner.warmup.capture(record.shape)
        if self._compile_only:
            check_unchanged(before, digest_tables(self._runner.model.model))
        self._runner.warmup.finish((*self.skipped, *self.buckets))
        seconds = time.perf_counter() - began
        num_skipped = len(self.skipped)
        return WarmUpReport(self.estimate, tuple(records), len(new), seconds, False, self.notes, num_skipped)

    def dry_run(self) -> WarmUpReport:
        """Return the estimate, and do nothing else.

        Raises:
            ValueError: the budget may be exceeded.
        """
        self._budget.check(self.estimate)
        return WarmUpReport(self.estimate, (), 0, 0.0, True, self.notes, len(self.skipped))

    def _checked(self, earlier: Manifest | None) -> Manifest | None:
        """Return the earlier manifest if its costs apply here."""
        if earlier is None:
            return None
        earlier.check(self._configuration, self._versions)
        others = earlier.differing_versions(self._versions)
        if others:
            self.note(f"the manifest's costs are of other software and are not used: {'; '.join(others)}")
            return None
        return earlier

    def _in_cache(self, chosen: Sequence[BatchShape], measured: Manifest | None) -> tuple[BatchShape, ...]:
        """Return the buckets whose code is in the compiler's cache by a manifest; say why if none is."""
        records = () if measured is None else measured.graphs
        known = [record for record in records if record.seconds is not None]
        if not known:
            return ()
        if self.cache is None:
            self.note(f"graphs of {self.backend} end with their process: the manifest's are captured again")
            return ()
        found = {record.shape for record in known if record.cache == self.cache.identifier}
        if not found:
            self.note(
                f"the manifest's graphs are captured again: the compiler's cache {self.cache.directory} is "
                "another one than theirs, or was emptied"
            )
        return tuple(bucket for bucket in chosen if bucket in found)

    def _check_table(self) -> None:
        try:
            check_holds_everything(self._table, self._engine.scheduler.limits)
        except ValueError as error:
            if self._on_miss is MissPolicy.ERROR:
                raise
            self.note(str(error))

    def note(self, sentence: str) -> None:
        """Add a sentence for the user."""
        self.notes = (*self.notes, sentence)

    def _count_routes(self) -> int:
        buckets = {bucket.num_logits: bucket for bucket in self.buckets}
        return sum(len(self._runner.warmup.routes(bucket)) for bucket in buckets.values())

    @staticmethod
    def _wait(jobs: Jobs) -> None:
        try:
            jobs.wait()
        except WarmUpStoppedError:
            raise
        except ValueError as error:
            raise WarmUpStoppedError(str(error)) from error

    def _capture(self, bucket: BatchShape, number: int) -> tuple[GraphRecord, bool]:
        try:
            record = self._capturing.capture(bucket)
        except torch.OutOfMemoryError as error:
            raise WarmUpStoppedError(
                f"out of memory at graph {number} of {len(self.buckets)}, {bucket}, the largest first: "
                f"expected {self.estimate.graphs[number - 1].num_bytes} bytes to suffice; lower num_blocks "
                "or kv_cache_bytes, or plan a smaller table"
            ) from error
        if record is None:
            return self._costs.get(bucket, GraphRecord(bucket)), False
        return record, True

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
            write_manifest(
                path, Manifest(self._configuration, self._versions, records, self._table.planned_padding)
            )
        except ValueError as error:
            raise WarmUpStoppedError(str(error)) from error


_GIB = 1 << 30
_LEAST_S = 1e-3


def plan_within(
    engine: Engine,
    num_graphs: int,
    budget: WarmUpBudget | None = None,
    recordings: Sequence[str | Path] = (),
) -> BucketTable:
    """Choose the buckets that pad least for the limits of an engine, by the cost of a step of its model.

    Args:
        num_graphs: most buckets.
        budget: bounds on their warm-up, by the estimates of ``GraphCosts``.
        recordings: files of ``record_shapes`` to plan for; without any, ``planning.simulation.prior``.

    Raises:
        ValueError: the budget is too small for the smallest table, a recording cannot be read, or it has
            shapes that the engine cannot produce.
    """
    budget = budget or WarmUpBudget()
    runner, limits, costs = engine.runner, engine.scheduler.limits, GraphCosts.of(engine)
    text_config = runner.model.model.config.get_text_config()
    longest_s = costs.seconds(limits.largest)[1]
    within = GraphBudget(
        num_graphs if budget.max_graphs is None else min(num_graphs, budget.max_graphs),
        seconds=budget.max_seconds,
        seconds_per_graph=None if budget.max_seconds is None else max(_LEAST_S, longest_s),
        memory_bytes=_for_graphs(budget, costs.sizes.transient_bytes(limits.largest)),
        bytes_of=None if budget.max_gib is None else costs.kept_bytes,
    )
    traffic = read_shapes(*recordings) if recordings else None
    return plan_buckets(limits, within, default_table(limits, runner.model.specs, text_config).cost, traffic)


def _for_graphs(budget: WarmUpBudget, transient_bytes: int) -> float | None:
    if budget.max_gib is None:
        return None
    left = budget.max_gib * _GIB - transient_bytes
    if left <= 0:
        raise ValueError(
            f"a budget of {budget.max_gib:g} GiB does not hold the smallest table: the largest step takes "
            f"{transient_bytes / _GIB:.3f} GiB while it runs"
        )
    return left
