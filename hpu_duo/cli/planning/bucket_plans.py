"""Strategies by name, and their tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from graphs import BatchShape, BucketTable, StepCost, StepLimits
from graphs.bucket_file import from_shape, write_gaudi_buckets, write_table
from graphs.planner import (
    GraphBudget,
    Grid,
    PaddingReport,
    Traffic,
    exponential,
    linear,
    padding_aware,
    upstream_unified,
)
from graphs.traffic_watch import PlannedPadding
from hpu_duo.planning.simulation import plan_buckets, prior

# Tables are planned for users of seed 0, and compared on those of seed 1.
_MEASURED_SEED = 2
_LONGEST_LIST = 20_000


def choose(
    name: str, limits: StepLimits, cost: StepCost, budget: GraphBudget, traffic: Traffic | None
) -> tuple[BatchShape, ...] | Grid:
    """Return the table that a strategy gives; budget and traffic are for the planned one."""
    match name:
        case "planned":
            return plan_buckets(limits, budget, cost, traffic).buckets
        case "thinned":
            return BucketTable.exponential(limits, cost=cost).buckets
        case "upstream-unified":
            return upstream_unified(limits)
        case "exponential":
            return exponential(limits)
        case "linear":
            return linear(limits)
        case _:
            return padding_aware(limits)


def measured_on(
    chosen: tuple[BatchShape, ...] | Grid,
    limits: StepLimits,
    cost: StepCost,
    recorded: Traffic | None,
    trims_chunks: bool,
) -> Traffic:
    """Return the recorded traffic, or else that of users that no table was chosen for.

    Args:
        trims_chunks: whether their prompts end at the borders of the chosen table.
    """
    if recorded is not None:
        return recorded
    table = BucketTable(listed(chosen), cost) if trims_chunks else None
    return prior(limits, seed=_MEASURED_SEED, table=table)


def listed(chosen: tuple[BatchShape, ...] | Grid) -> tuple[BatchShape, ...]:
    """All shapes, sorted.

    Raises:
        ValueError: they are too many to list.
    """
    if not isinstance(chosen, Grid):
        return tuple(sorted(chosen))
    if len(chosen) > _LONGEST_LIST:
        raise ValueError(
            f"expected a strategy that makes at most {_LONGEST_LIST:,} shapes, this one makes "
            f"{len(chosen):,}; --compare shows what it costs"
        )
    return tuple(sorted(chosen.buckets()))


def write(
    out: Path | None,
    gaudi_out: Path | None,
    shapes: tuple[BatchShape, ...],
    comment: str,
    planned_padding: PlannedPadding,
) -> None:
    """Write the table with the padding that it promises, and the file for vllm-gaudi, where asked to.

    Raises:
        ValueError: a file cannot be written.
    """
    try:
        if out is not None:
            write_table(out, shapes, comment, planned_padding)
        if gaudi_out is not None:
            write_gaudi_buckets(gaudi_out, (b for shape in shapes for b in from_shape(shape)), comment)
    except OSError as error:
        raise ValueError(f"cannot write {error.filename}: {error.strerror}") from error


def bucket_table(shapes: tuple[BatchShape, ...], cost: StepCost) -> Table:
    """The shapes, cheapest first, with their costs relative to the first."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("phase", "query tokens", "shared blocks", "unique blocks", "logit rows", "cost"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    least = min(map(cost, shapes))
    for shape in sorted(shapes, key=cost):
        table.add_row(
            str(shape.phase), *(f"{size:,}" for size in shape.levels[3:]), f"{cost(shape) / least:.2f}"
        )
    return table


def padding_table(reports: Mapping[str, PaddingReport], is_recorded: bool) -> Table:
    """The strategies side by side.

    Args:
        is_recorded: whether they were measured on the recording that the planned table was made from.
    """
    traffic = "the recorded steps themselves (later ones may pad more)" if is_recorded else "assumed traffic"
    table = Table(box=None, padding=(0, 2, 0, 0), title=f"Padding of {traffic}", title_justify="left")
    columns: tuple[tuple[str, Any], ...] = (
        ("strategy", "left"),
        ("graphs", "right"),
        ("mean", "right"),
        ("worst step", "right"),
        ("worst possible", "right"),
        ("steps without a bucket", "right"),
    )
    for name, justify in columns:
        table.add_column(name, justify=justify)
    for name, report in reports.items():
        table.add_row(
            name,
            f"{report.num_buckets:,}",
            f"{report.mean:.1%}",
            f"{report.worst:.0%}",
            f"{report.worst_reachable:.0%}",
            f"{report.missed:.1%}",
        )
    return table
