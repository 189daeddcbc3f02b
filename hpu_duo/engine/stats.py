"""Counts of what an engine has done, and of what it stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpu_duo.engine.head_stats import BudgetStats, RuleStats
from hpu_duo.engine.resolved import Resolved
from hpu_duo.engine.telemetry import Telemetry, held_bytes

if TYPE_CHECKING:
    from hpu_duo.engine.executor import Executor
    from hpu_duo.engine.runner import Runner
    from hpu_duo.engine.scheduler import Scheduler
    from hpu_duo.engine.telemetry import Drift
    from hpu_duo.heads import HeadPattern
    from hpu_duo.kv.allocations import KVAllocations
    from hpu_duo.kv.plan import MemoryPlan


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
        num_padded_tokens, num_query_tokens: query tokens that were padding, and all that ran.
        num_preemptions: preemptions of requests for lack of blocks.
        num_graph_misses: steps with a shape that fits no bucket.
        num_late_captures: planned buckets captured only when a request needed them.
        num_uncaptured_steps: steps of buckets that are too long to be captured.
        num_unrecorded_steps: steps that were served but could not be recorded, as on a full disk.
        num_running, num_waiting: requests now.
        used_blocks, total_blocks, used_rows, total_rows: allocations now.
        kv_bytes: bytes of the stores.
        graph_bytes: bytes of device memory reserved for graphs.
        held_bytes: bytes of the allocated blocks and rows; blocks that several requests share count once.
        full_attention_bytes: bytes of the cached tokens if every head stored blocks.
        peak_held_bytes, peak_full_attention_bytes: both at the step with the most cached tokens.
        peak_unshared_bytes: bytes of that step's requests if no block were shared.
        host_s, device_s: seconds spent planning and building steps, and running them.
        bytes_copied: bytes of step messages, copied to the device.
        notes: remarks for the user on how the model was loaded.
        resolved: settings of the engine; see there.
        prefixes: of the prefix cache; None without one.
        budget: of heads with a KV budget; None without any.
        ranks: traffic between ranks; None for one rank.
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
    prefixes: PrefixStats | None = None
    budgets: tuple[BudgetStats, ...] = ()
    attention_rules: tuple[RuleStats, ...] = ()
    ranks: RankStats | None = None

    @classmethod
    def of(
        cls,
        telemetry: Telemetry,
        scheduler: Scheduler,
        runner: Runner,
        patterns: tuple[HeadPattern, HeadPattern] | None,
        notes: tuple[str, ...] = (),
    ) -> EngineStats:
        """Collect the counters and current allocations."""
        counters = telemetry.counters
        allocations, memory, graphs = scheduler.allocations, runner.store.plan, runner.graphs.counters
        return cls(
            steps=dict(counters.steps),
            num_prompt_tokens=counters.num_prompt_tokens,
            num_output_tokens=counters.num_output_tokens,
            num_drafted_tokens=counters.num_drafted_tokens,
            num_accepted_tokens=counters.num_accepted_tokens,
            num_padded_tokens=counters.num_padded_tokens,
            num_query_tokens=counters.num_query_tokens,
            num_preemptions=counters.num_preemptions,
            num_graph_misses=graphs.misses,
            num_late_captures=graphs.late_captures,
            num_uncaptured_steps=graphs.bypasses,
            num_unrecorded_steps=counters.num_unrecorded_steps,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            used_blocks=allocations.blocks.num_used,
            total_blocks=memory.num_blocks if memory.uses_blocks else 0,
            used_rows=allocations.rows.num_used,
            total_rows=memory.max_num_seqs,
            kv_bytes=runner.store.num_bytes,
            graph_bytes=memory.graph_bytes,
            held_bytes=held_bytes(allocations, memory),
            full_attention_bytes=memory.full_attention_bytes(scheduler.num_cached_tokens),
            peak_held_bytes=counters.peak_held_bytes,
            peak_full_attention_bytes=counters.peak_full_attention_bytes,
            peak_unshared_bytes=counters.peak_unshared_bytes,
            host_s=counters.host_s,
            device_s=counters.device_s,
            bytes_copied=runner.executor.bytes_copied,
            resolved=Resolved.of(runner, scheduler, patterns),
            notes=notes,
            drift=telemetry.shapes.drift,
            prefixes=PrefixStats.of(allocations, memory),
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
