"""Counts of what an engine has done, and of what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpu_duo.engine.budget_stats import BudgetStats
from hpu_duo.engine.prefix_stats import PrefixStats
from hpu_duo.engine.rank_stats import RankStats
from hpu_duo.engine.resolved import Resolved
from hpu_duo.engine.rule_stats import RuleStats
from hpu_duo.engine.telemetry import Telemetry, held_bytes

if TYPE_CHECKING:
    from hpu_duo.engine.runner import Runner
    from hpu_duo.engine.scheduler import Scheduler
    from hpu_duo.engine.shape_watch import Drift
    from hpu_duo.heads import HeadPattern


@dataclass(frozen=True)
class EngineStats:
    """A snapshot.

    Attributes:
        steps: number of steps by phase string of the exact shape.
        num_prompt_tokens, num_output_tokens: tokens computed for prompts (again after a preemption), and
            tokens sampled.
        num_padded_tokens, num_query_tokens: query tokens that were padding, and all that ran.
        num_preemptions: requests that lost their place for lack of blocks.
        num_graph_misses: steps whose shape no bucket held.
        num_late_captures: planned buckets captured only when a request needed them.
        num_uncaptured_steps: steps of buckets that are too long to be captured.
        num_unrecorded_steps: steps that were served but could not be recorded, as on a full disk.
        num_running, num_waiting: requests now.
        used_blocks, total_blocks, used_rows, total_rows: leases now.
        kv_bytes: bytes that the stores take.
        graph_bytes: bytes of device memory that were set aside for graphs.
        held_bytes: bytes of the leased blocks and rows; blocks that several requests share count once.
        full_attention_bytes: bytes that the cached tokens would take with every head in blocks.
        peak_held_bytes, peak_full_attention_bytes: both at the step with the most cached tokens.
        peak_unshared_bytes: what its requests would have held then if none had shared a block.
        host_s, device_s: seconds spent planning and building steps, and running them.
        bytes_copied: bytes of step messages, copied to the device.
        notes: what a user should know of how the model was loaded.
        resolved: what the engine runs with; see there.
        prefixes: of the prefix cache; None without one.
        budget: of heads with a KV budget; None without any.
        ranks: what the ranks of a shared model exchange; None for one rank.
        drift: padding far beyond what the bucket table promises, once there was; else None.
    """

    steps: dict[str, int]
    num_prompt_tokens: int
    num_output_tokens: int
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
        """Collect the counters, and what is allocated now."""
        counters = telemetry.counters
        leases, memory, graphs = scheduler.leases, runner.store.plan, runner.graphs.counters
        return cls(
            steps=dict(counters.steps),
            num_prompt_tokens=counters.num_prompt_tokens,
            num_output_tokens=counters.num_output_tokens,
            num_padded_tokens=counters.num_padded_tokens,
            num_query_tokens=counters.num_query_tokens,
            num_preemptions=counters.num_preemptions,
            num_graph_misses=graphs.misses,
            num_late_captures=graphs.late_captures,
            num_uncaptured_steps=graphs.bypasses,
            num_unrecorded_steps=counters.num_unrecorded_steps,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            used_blocks=leases.blocks.num_used,
            total_blocks=memory.num_blocks if memory.uses_blocks else 0,
            used_rows=leases.rows.num_used,
            total_rows=memory.max_num_seqs,
            kv_bytes=runner.store.num_bytes,
            graph_bytes=memory.graph_bytes,
            held_bytes=held_bytes(leases, memory),
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
            prefixes=PrefixStats.of(leases, memory),
            ranks=RankStats.of(runner.executor),
            budgets=BudgetStats.of(counters.num_given_up, leases, memory),
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
