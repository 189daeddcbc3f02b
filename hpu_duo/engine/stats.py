"""Counts of what an engine has done, and of what it stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from graphs import StepLimits
from hpu_duo.engine.drafts import SpeculationStats
from hpu_duo.engine.telemetry import BudgetStats, RuleStats, held_bytes
from hpu_duo.kv.plan import ring_slack
from hpu_duo.kv.tiers.disk import DiskCounters, DiskTier
from hpu_duo.kv.tiers.swap import SwapCounters
from hpu_duo.modeling.packed_linear import PanelLinear
from hpu_duo.modeling.precision import name_of
from hpu_duo.modeling.quantised.panels import PanelQuantisedLinear, weights_of
from hpu_duo.parallel import ContextParallelBlocks
from kernels_ref import Implementation, LayerSpec
from kernels_ref.native import COMPILERS
from kernels_ref.x86 import library as x86

if TYPE_CHECKING:
    from hpu_duo.engine.executor import Executor
    from hpu_duo.engine.replanning import ReplanStats
    from hpu_duo.engine.scheduler import Scheduler
    from hpu_duo.engine.stepper import Runner, Stepper
    from hpu_duo.engine.telemetry import Drift
    from hpu_duo.heads import HeadPattern
    from hpu_duo.kv.allocations import KVAllocations
    from hpu_duo.kv.plan import MemoryPlan


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The resolved settings of an engine: each "auto" and each None is replaced by the value in use.

    Attributes:
        device: where steps run.
        dtype: of arithmetic.
        weight_dtype: of linear weights in memory.
        kv_cache_dtype: how each kind of heads stores keys and values.
        kernels: on a CPU their instructions, elsewhere the implementation of attention.
        attention: implementation of the attention kernels.
        softmax: precision of its scores and exponentials.
        graphs: capture backend.
        num_buckets: current shapes of the table; 0 where steps run at their exact shapes.
        on_miss: what happens to a step that fits no bucket.
        max_captured_tokens: buckets with more query tokens run uncaptured; None = all are captured.
        trims_chunks: whether prompts end at the borders of buckets.
        scheduling_policy: order of admission and preemption.
        limits: of steps.
        num_retrieval_heads, num_streaming_heads: KV heads of all layers, by whether they see the whole text.
        retrieval_parallel: what is sharded of retrieval heads: heads, or the context of each.
        num_layer_kinds: kinds of layers, each of which is compiled for every bucket.
        num_promoted_heads: streaming heads of the pattern that are served as retrieval heads on this rank,
            because of ``max_layer_kinds`` or to shard heads evenly.
        promoted_bytes: bytes of the blocks of these heads, beyond those of their rings.
        token_bytes: bytes of one more token in the blocks of all layers, scales included; 0 without blocks.
        weights: formats of linear layers whose weights stay codes, with their kernels; "plain" if none does.
        weight_bytes: of all weights.
        device_weight_bytes, host_weight_bytes, disk_weight_bytes: of these by where they lie; the device's
            with buffers through which the others pass.
        kv_bytes, graph_bytes: memory of the stores, those of a draft model included, and memory set aside
            for graphs.
    """

    device: str
    dtype: str
    weight_dtype: str
    kv_cache_dtype: str
    kernels: str
    attention: str
    softmax: str
    graphs: str
    num_buckets: int
    on_miss: str
    max_captured_tokens: int | None
    trims_chunks: bool
    scheduling_policy: str
    limits: StepLimits
    num_retrieval_heads: int
    num_streaming_heads: int
    retrieval_parallel: str
    num_layer_kinds: int
    num_promoted_heads: int
    promoted_bytes: int
    token_bytes: int
    weights: str
    weight_bytes: int
    device_weight_bytes: int
    host_weight_bytes: int
    disk_weight_bytes: int
    kv_bytes: int
    graph_bytes: int

    @classmethod
    def of(
        cls, runner: Runner, scheduler: Scheduler, patterns: tuple[HeadPattern, HeadPattern] | None
    ) -> Resolved:
        """Collect the settings of an engine from its parts.

        Args:
            patterns: heads that retrieve, of the whole model and of this rank; None if all do.
        """
        graphs, specs = runner.graphs, runner.model.specs
        dtype = name_of(runner.model.model.dtype)
        weights, weight_bytes = weights_of(runner.model.model)
        stream = runner.model.stream
        on_host, on_disk, in_buffers = (
            (0, 0, 0) if stream is None else (stream.num_bytes, stream.disk_bytes, stream.buffer_bytes)
        )
        return cls(
            device=str(runner.device),
            dtype=dtype,
            weight_dtype=name_of(weight_dtype(runner)),
            kv_cache_dtype=_formats(specs, dtype),
            kernels=kernels_of(runner),
            attention=specs[0].impl.value,
            softmax=specs[0].softmax.value,
            graphs=graphs.backend.name,
            num_buckets=len(graphs.table) if runner.executor.uses_table else 0,
            on_miss=graphs.policy.value,
            max_captured_tokens=graphs.max_captured_tokens,
            trims_chunks=scheduler.trims_chunks,
            scheduling_policy=scheduler.policy.name,
            limits=scheduler.limits,
            num_retrieval_heads=sum(spec.num_retrieval for spec in specs),
            num_streaming_heads=sum(spec.num_kv_heads - spec.num_retrieval for spec in specs),
            retrieval_parallel="context" if any(map(_is_context_parallel, specs)) else "heads",
            num_layer_kinds=len(runner.model.kinds),
            num_promoted_heads=0 if patterns is None else patterns[1].num_promoted,
            promoted_bytes=_promoted_bytes(runner, scheduler.limits, patterns),
            token_bytes=runner.store.plan.block_bytes // runner.store.plan.block_size,
            weights=weights,
            weight_bytes=weight_bytes,
            device_weight_bytes=weight_bytes - on_host - on_disk + in_buffers,
            host_weight_bytes=on_host,
            disk_weight_bytes=on_disk,
            kv_bytes=_store_bytes(runner),
            graph_bytes=runner.store.plan.graph_bytes,
        )

    def items(self) -> dict[str, str | int | bool | None]:
        """Return all settings by name, limits included, as values for JSON and tables."""
        plain = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "limits"}
        return {**plain, **asdict(self.limits)}

    @property
    def computation(self) -> str:
        """Device, kernels and dtypes in one line."""
        dtypes = f"weights {self.weight_dtype}, KV {self.kv_cache_dtype}, arithmetic {self.dtype}"
        return f"{self.device}, {self.kernels}; {dtypes}"

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.items().items())


def _formats(specs: Sequence[LayerSpec], dtype: str) -> str:
    """Formats of keys and values, with the heads of each where there are several."""
    found: Counter[tuple[str, str]] = Counter()
    for spec in specs:
        for group in spec.groups:
            found[dtype if group.format.is_plain else group.format.name, group.kind.name] += group.num_heads
    if len(names := {name for name, _ in found}) == 1:
        return names.pop()
    return ", ".join(f"{name} ({num} heads in {kind})" for (name, kind), num in found.items())


def _is_context_parallel(spec: LayerSpec) -> bool:
    return any(group.kind.name == ContextParallelBlocks.name for group in spec.groups)


def _store_bytes(runner: Runner) -> int:
    """Bytes of the stores of the model, and of one that drafts for it over stores of its own."""
    drafts = runner.executor.drafts
    return runner.store.num_bytes + (0 if drafts is None else drafts.num_bytes)


def _promoted_bytes(
    runner: Runner, limits: StepLimits, patterns: tuple[HeadPattern, HeadPattern] | None
) -> int:
    if patterns is None or patterns[1].promoted is None or patterns[0].promoted is None:
        return 0
    (whole, own), memory, spread = patterns, runner.store.plan, runner.executor.spread
    is_context_parallel = spread is not None and any(map(_is_context_parallel, runner.model.specs))
    # With context-parallel blocks, each rank stores its part of the tokens of all promoted heads.
    num_parts = spread.num_ranks if is_context_parallel and spread is not None else 1
    in_blocks = whole.promoted if is_context_parallel else own.promoted
    slack = ring_slack(limits.decode_len)
    ring_slots = min(own.sink + own.recent, limits.max_model_len) + slack
    # One more row is the null unit, and others are read from the scratch.
    num_rows = limits.num_ring_rows + 1 + memory.max_chunk_rows
    block_slots = (memory.num_blocks + 1) * (memory.block_size // num_parts)
    assert in_blocks is not None and own.promoted is not None, "asked before"  # noqa: PT018
    return sum(
        (int(blocks.sum()) * block_slots - int(rings.sum()) * num_rows * ring_slots)
        * memory.token_bytes(layer, layer.groups[0])
        for blocks, rings, layer in zip(in_blocks, own.promoted, memory.layers)
    )


@dataclass(frozen=True)
class PrefixStats:
    """A snapshot of the prefix cache.

    Attributes:
        num_queried_tokens: known tokens of requests when admitted, again after a preemption.
        num_hit_tokens: those of them that hit the cache.
        num_lost_to_snapshots: those in cached blocks after the last snapshot of rings, hence not usable.
        num_lost_to_blocks: those in blocks that were cached and evicted, as far as is remembered.
        num_evicted_blocks, num_evicted_snapshots: evicted to make room.
        num_idle_blocks: cached blocks without references.
        num_held_blocks: blocks that contexts pin.
        num_snapshots: snapshots of rings.
        idle_bytes, context_bytes, snapshot_bytes: their sizes.
    """

    num_queried_tokens: int
    num_hit_tokens: int
    num_lost_to_snapshots: int
    num_lost_to_blocks: int
    num_evicted_blocks: int
    num_evicted_snapshots: int
    num_idle_blocks: int
    num_held_blocks: int
    num_snapshots: int
    idle_bytes: int
    context_bytes: int
    snapshot_bytes: int

    @classmethod
    def of(cls, allocations: KVAllocations, memory: MemoryPlan) -> PrefixStats | None:
        """Collect the counters; None where prefixes are not cached."""
        cache = allocations.prefixes
        if cache is None:
            return None
        return cls(
            **vars(cache.counters),
            num_idle_blocks=allocations.blocks.num_idle,
            num_held_blocks=allocations.num_held_blocks,
            num_snapshots=cache.num_snapshots,
            idle_bytes=allocations.blocks.num_idle * memory.block_bytes,
            context_bytes=allocations.num_held_blocks * memory.block_bytes,
            snapshot_bytes=cache.num_snapshots * memory.row_bytes,
        )

    @property
    def hit_rate(self) -> float:
        """Share of queried tokens that hit the cache."""
        return self.num_hit_tokens / max(1, self.num_queried_tokens)


@dataclass(frozen=True)
class DiskStats:
    """A snapshot of the prefix cache's tier on disk.

    Attributes:
        counters: totals, a copy.
        num_records: blocks and snapshots on disk that can be read.
        num_reading, num_writing: those on their way to the host, and from there.
        used_bytes: of those that can be read.
        is_off: whether a failure has switched it off.
        is_writer: whether this process writes; otherwise it reads what another one writes.
    """

    counters: DiskCounters
    num_records: int
    num_reading: int
    num_writing: int
    used_bytes: int
    is_off: bool
    is_writer: bool

    @classmethod
    def of(cls, disk: DiskTier) -> DiskStats:
        """Collect the counters."""
        return cls(
            replace(disk.counters),
            num_records=len(disk),
            num_reading=disk.num_reads,
            num_writing=disk.num_writes,
            used_bytes=disk.num_bytes,
            is_off=disk.is_off,
            is_writer=disk.is_writer,
        )


@dataclass(frozen=True)
class OffloadStats:
    """A snapshot of the prefix cache's tier in host memory.

    Attributes:
        num_stored, num_loaded: blocks and snapshots that were copied to the host, and from there.
        stored_bytes, loaded_bytes: of them.
        stored_s, loaded_s: seconds of these copies, beside steps.
        num_queried_tokens: tokens of requests that were looked for because the device did not have them.
        num_hit_tokens: tokens that requests did not compute because they were loaded.
        num_busy: blocks and snapshots that were lost, because all slots or units of transfers were busy.
        num_computed: prefixes that were predicted to be computed faster than loaded.
        num_abandoned: loads that ended early, for lack of blocks, or because a record was lost.
        num_damaged: blocks and snapshots that did not have their checksum on the host, and were dropped.
        num_cached: blocks and snapshots in the cache of the device.
        num_records: blocks and snapshots on the host, or on their way there.
        num_leaving: of them, those that are on their way from the device.
        num_loading: those on their way from the host to the device, which stay on the host.
        num_transfers: copies between device and host that have not ended.
        num_evicted: that were evicted from there.
        used_bytes, total_bytes: of the host's memory on this rank.
        disk: of its tier on disk; None without one.
        swap: of preempted requests; None where they are computed again.
    """

    num_stored: int
    num_loaded: int
    stored_bytes: int
    loaded_bytes: int
    stored_s: float
    loaded_s: float
    num_queried_tokens: int
    num_hit_tokens: int
    num_busy: int
    num_computed: int
    num_abandoned: int
    num_damaged: int
    num_cached: int
    num_records: int
    num_leaving: int
    num_loading: int
    num_transfers: int
    num_evicted: int
    used_bytes: int
    total_bytes: int
    disk: DiskStats | None = None
    swap: SwapCounters | None = None

    @classmethod
    def of(cls, allocations: KVAllocations) -> OffloadStats | None:
        """Collect the counters; None without a tier."""
        tiers, cache = allocations.tiers, allocations.prefixes
        if tiers is None or cache is None:
            return None
        host = tiers.host
        return cls(
            **vars(tiers.counters),
            num_cached=cache.num_blocks + cache.num_snapshots,
            num_records=len(host),
            num_leaving=tiers.num_leaving,
            num_loading=tiers.num_loading,
            num_transfers=tiers.stage.num_open,
            num_evicted=host.num_evicted,
            used_bytes=host.num_used_slots * tiers.sizes.slot_bytes,
            total_bytes=host.num_slots * tiers.sizes.slot_bytes,
            swap=None if tiers.swap is None else replace(tiers.swap.counters),
            disk=None if tiers.disk is None else DiskStats.of(tiers.disk),
        )


@dataclass(frozen=True)
class RankStats:
    """Traffic of rank 0 with other ranks. Warm-up is counted in messages only.

    Attributes:
        num_messages: orders of rank 0, one a step.
        num_broadcasts: as many, and one more for each message that is longer than any before.
        broadcast_bytes: of all broadcasts, padding to the longest message included.
        reduced_bytes: bytes that a rank has sent in all-reduces of steps, by the formula of
            ``hpu_duo.parallel.StepExchanges``.
        gathered_bytes: in all-gathers: candidates or logits, and, context-parallel, keys, values, queries and
            partial results.
        scattered_bytes: in all-to-all exchanges.
    """

    num_messages: int
    num_broadcasts: int
    broadcast_bytes: int
    reduced_bytes: int
    gathered_bytes: int
    scattered_bytes: int

    @classmethod
    def of(cls, executor: Executor) -> RankStats | None:
        """Collect the counters; None without other ranks."""
        if executor.followers is None or executor.spread is None:
            return None
        reduced, gathered, scattered = executor.exchanged
        return cls(*executor.followers.sent, reduced, gathered + executor.spread.gathered_bytes, scattered)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot.

    Attributes:
        steps: number of steps by phase string of the exact shape.
        num_prompt_tokens, num_output_tokens: tokens computed for prompts (again after a preemption), and
            tokens sampled, without rejected drafts.
        num_drafted_tokens, num_accepted_tokens: verified and accepted draft tokens.
        speculation: of drafts; None without a drafter.
        num_padded_tokens, num_query_tokens: query tokens that were padding, and all that ran.
        num_preemptions: preemptions of requests for lack of blocks.
        num_graph_misses: steps with a shape that fits no bucket.
        num_late_captures: planned buckets captured only when a request needed them.
        num_uncaptured_steps: steps of buckets that are too long to be captured.
        num_unrecorded_steps: steps that were served but could not be recorded, as on a full disk.
        num_clipped_values: elements of keys and values of prompts beyond the range of a format of constant
            scales, on this rank; on devices other than a CPU up to ten seconds old.
        num_running, num_waiting: requests now.
        used_blocks, total_blocks, used_rows, total_rows: allocations now.
        kv_bytes: bytes of the stores, those of a draft model included.
        graph_bytes: bytes of device memory reserved for graphs.
        used_host_blocks: KV blocks of running requests in host memory.
        held_bytes: bytes of the allocated blocks and rows, on the host too; blocks that several requests
            share count once.
        full_attention_bytes: bytes of the cached tokens if every head stored blocks.
        peak_held_bytes, peak_full_attention_bytes: both at the step with the most cached tokens.
        peak_unshared_bytes: bytes of that step's requests if no block were shared.
        host_s, device_s: seconds spent planning and building steps, and running them.
        bytes_copied: bytes of step messages, copied to the device.
        notes: remarks for the user on how the model was loaded.
        resolved: settings of the engine; see there.
        prefixes: of the prefix cache; None without one.
        offload: of its tier in host memory; None without one.
        budget: of heads with a KV budget; None without any.
        ranks: traffic between ranks; None for one rank.
        replanned: bucket tables that were planned while serving; None without ``replan``.
        drift: padding far beyond that which the bucket table was planned for, once detected; else None.
    """

    steps: dict[str, int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    num_padded_tokens: int
    num_query_tokens: int
    num_preemptions: int
    num_graph_misses: int
    num_late_captures: int
    num_uncaptured_steps: int
    num_unrecorded_steps: int
    num_clipped_values: int
    num_running: int
    num_waiting: int
    used_blocks: int
    total_blocks: int
    used_rows: int
    total_rows: int
    kv_bytes: int
    graph_bytes: int
    held_bytes: int
    full_attention_bytes: int
    peak_held_bytes: int
    peak_full_attention_bytes: int
    peak_unshared_bytes: int
    host_s: float
    device_s: float
    bytes_copied: int
    resolved: Resolved
    notes: tuple[str, ...] = ()
    drift: Drift | None = None
    replanned: ReplanStats | None = None
    prefixes: PrefixStats | None = None
    offload: OffloadStats | None = None
    used_host_blocks: int = 0
    budgets: tuple[BudgetStats, ...] = ()
    attention_rules: tuple[RuleStats, ...] = ()
    ranks: RankStats | None = None
    speculation: SpeculationStats | None = None

    @classmethod
    def of(
        cls,
        stepper: Stepper,
        scheduler: Scheduler,
        runner: Runner,
        patterns: tuple[HeadPattern, HeadPattern] | None,
        notes: tuple[str, ...] = (),
    ) -> EngineStats:
        """Collect the counters and current allocations."""
        telemetry, replanner = stepper.telemetry, stepper.replanner
        counters = telemetry.counters
        drafts = stepper.speculation.stats()
        allocations, memory, graphs = scheduler.allocations, runner.store.plan, runner.graphs.counters
        return cls(
            steps={str(phase): count for phase, count in counters.steps.items()},
            num_prompt_tokens=counters.num_prompt_tokens,
            num_output_tokens=counters.num_output_tokens,
            num_drafted_tokens=drafts.num_draft_tokens,
            num_accepted_tokens=drafts.num_accepted_tokens,
            num_padded_tokens=counters.num_padded_tokens,
            num_query_tokens=counters.num_query_tokens,
            num_preemptions=counters.num_preemptions,
            num_graph_misses=graphs.misses,
            num_late_captures=graphs.late_captures,
            num_uncaptured_steps=graphs.bypasses,
            num_unrecorded_steps=counters.num_unrecorded_steps,
            num_clipped_values=runner.model.num_clipped(),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            used_blocks=allocations.blocks.num_used,
            total_blocks=allocations.blocks.num_blocks if memory.uses_blocks else 0,
            used_rows=allocations.rows.num_used,
            total_rows=memory.max_num_seqs,
            kv_bytes=_store_bytes(runner),
            graph_bytes=memory.graph_bytes,
            held_bytes=held_bytes(allocations, memory),
            full_attention_bytes=memory.full_attention_bytes(scheduler.num_cached_tokens),
            peak_held_bytes=counters.peak_held_bytes,
            peak_full_attention_bytes=memory.full_attention_bytes(counters.peak_cached_tokens),
            peak_unshared_bytes=counters.peak_unshared_bytes,
            host_s=counters.host_s,
            device_s=counters.device_s,
            bytes_copied=runner.executor.bytes_copied,
            resolved=Resolved.of(runner, scheduler, patterns),
            notes=(*notes, *stepper.notes),
            speculation=None if stepper.drafter is None else drafts,
            drift=telemetry.shapes.drift,
            replanned=None if replanner is None else replanner.stats,
            prefixes=PrefixStats.of(allocations, memory),
            offload=OffloadStats.of(allocations),
            used_host_blocks=0 if allocations.host is None else allocations.host.num_used,
            ranks=RankStats.of(runner.executor),
            budgets=BudgetStats.of(counters.num_evicted_tokens, allocations, memory),
            attention_rules=RuleStats.all_of(counters.tiles, memory),
        )

    @property
    def num_steps(self) -> int:
        """Steps of all phases."""
        return sum(self.steps.values())

    @property
    def padding(self) -> float:
        """Share of the query tokens that were padding."""
        return self.num_padded_tokens / max(1, self.num_query_tokens)


def weight_dtype(runner: Runner) -> torch.dtype:
    """The dtype of linear layers in memory."""
    model = runner.model.model
    return next((each.packed.dtype for each in model.modules() if isinstance(each, PanelLinear)), model.dtype)


def kernels_of(runner: Runner) -> str:
    """The kernels of a runner: on a CPU their instructions, elsewhere the attention implementation."""
    spec = runner.model.specs[0]
    if runner.device.type != "cpu":
        return ", ".join((spec.impl.value, *spec.operators.names))
    arithmetic = runner.model.model.dtype
    layers = (isinstance(each, PanelLinear | PanelQuantisedLinear) for each in runner.model.model.modules())
    if x86.is_available(arithmetic) and (spec.impl is Implementation.SDPA or any(layers)):
        return x86.description(arithmetic)
    return f"torch's ({torch.backends.cpu.get_cpu_capability()})"


def faster_kernels(runner: Runner) -> Iterator[str]:
    """Yield sentences on what would make steps faster on this machine."""
    dtype = runner.model.model.dtype
    if runner.device.type != "cpu" or x86.is_available(dtype):
        return
    if x86.switch() == "0":
        yield f"{x86.SWITCH}=0 switches our kernels off: {x86.LOSS}"
    elif x86.lanes() and x86.origin() is None:
        names = ", ".join(COMPILERS)
        yield f"our kernels need a C++ compiler, one of {names}, or a wheel that has them built: {x86.LOSS}"
    elif x86.serves(dtype, dtype):
        yield f"our kernels could not be built, and a warning has the reason: {x86.LOSS}"
    elif x86.serves(dtype, torch.float32):
        yield f"dtype='auto' computes in float32 on the same 16-bit weights, by our kernels: {x86.LOSS}"
