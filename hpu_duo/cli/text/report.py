"""The numbers of a run, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hpu_duo.cli.terminal.sizes import show_bytes
from hpu_duo.cli.text.serving import Pace, RunReport

if TYPE_CHECKING:
    from hpu_duo.engine.prefix_stats import PrefixStats
    from hpu_duo.engine.stats import EngineStats


_MOST_RATIO = 1.1
"""Most of full attention that is shown as a percentage: beyond it, blocks and rings are mostly empty."""


def run_table(report: RunReport) -> Table:
    """Speed, steps, padding, and KV bytes against full attention."""
    stats = report.stats
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("prefill", _speed(report.prefill))
    num_mixed = stats.num_output_tokens - report.decode.num_tokens
    table.add_row("decode", f"{_speed(report.decode)} ({num_mixed:,} more came with prefills)")
    steps = "  ".join(f"{phase} x {count}" for phase, count in sorted(stats.steps.items()))
    table.add_row("steps", steps or "none")
    table.add_row("padding", f"{stats.padding:.1%} of the query tokens")
    table.add_row("KV at peak", kv_text(stats))
    for budget in stats.budgets:
        table.add_row(
            "KV budget",
            f"{budget.policy}: {budget.num_slots} tokens of a request in {budget.num_heads} heads, "
            f"{budget.num_evictions} evicted",
        )
    for ruled in stats.attention_rules:
        share = f"{ruled.tiles.num_tiles:,} of {ruled.tiles.num_dense_tiles:,} tiles"
        table.add_row("attention rule", f"{ruled.rule} in {ruled.num_heads} heads: {share} of each")
    if stats.prefixes is not None:
        table.add_row("prefix cache", _prefixes(stats.prefixes))
    if stats.num_preemptions:
        table.add_row("preempted", f"{stats.num_preemptions} times, for lack of blocks")
    if stats.num_graph_misses or stats.num_late_captures:
        missed = f"{stats.num_graph_misses} shapes outside the table, {stats.num_late_captures} captured late"
        table.add_row("graphs", missed)
    if stats.num_uncaptured_steps:
        table.add_row("uncaptured", f"{stats.num_uncaptured_steps} steps, too long to be captured")
    for note in stats.notes:
        table.add_row("note", note)
    return table


def run_fields(report: RunReport) -> dict[str, Any]:
    """The same for programs: seconds, bytes, counts."""
    stats = report.stats
    return {
        "is_interrupted": report.is_interrupted,
        "prefill": _pace_fields(report.prefill),
        "decode": _pace_fields(report.decode),
        "kv_ratio": _ratio(stats.peak_unshared_bytes, stats.peak_full_attention_bytes),
        "stats": {**asdict(stats), "num_steps": stats.num_steps, "padding": stats.padding},
    }


def _speed(pace: Pace) -> str:
    if pace.tokens_per_s is None:
        return "none"
    return f"{pace.num_tokens:,} tokens, {pace.tokens_per_s:,.1f} tokens/s"


def _pace_fields(pace: Pace) -> dict[str, Any]:
    return {**asdict(pace), "tokens_per_s": pace.tokens_per_s}


def _prefixes(prefixes: PrefixStats) -> str:
    text = f"{prefixes.hit_rate:.1%} of the tokens were there, {show_bytes(prefixes.idle_bytes)} idle"
    if prefixes.context_bytes:
        text += f", {show_bytes(prefixes.context_bytes)} in contexts"
    return f"{text}, {show_bytes(prefixes.snapshot_bytes)} in snapshots"


def kv_text(stats: EngineStats) -> str:
    """Bytes that requests held, against full attention for the same tokens when none of them shares a block.

    Whole blocks and rings of short texts are more than their tokens, and no share of them.
    """
    held, unshared, full = stats.peak_held_bytes, stats.peak_unshared_bytes, stats.peak_full_attention_bytes
    ratio = _ratio(unshared, full)
    if ratio is None:
        return "nothing held"
    text = f"{show_bytes(held)} held"
    if held != unshared:
        text += f"; {show_bytes(unshared)} without sharing"
    if ratio > _MOST_RATIO:
        return f"{text}, in whole blocks and rings (texts too short to compare with full attention)"
    return f"{text}, {ratio:.1%} of the {show_bytes(full)} of full attention"


def _ratio(held: int, full: int) -> float | None:
    return held / full if full else None
