"""Rows of the engine beside those of kvpress, with the difference and its interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpu_duo.lab.eval.kv_bytes import KVBytes
from hpu_duo.lab.eval.policy_curve import PERPLEXITY, TASKS

KVPRESS = "kvpress"
"""Name of the system in records; all others are the engine's."""
_POINT = ("task", "policy", "budget")
_TIMES = ("time_s", "cpu_s")


def difference(
    ours: tuple[float, float, float], theirs: tuple[float, float, float]
) -> tuple[float, float, float]:
    """The difference of two values with their intervals, and its interval.

    The two are taken for independent. Both answer the same questions, which makes the interval of a
    difference too wide rather than too narrow where they mostly agree.

    Args:
        ours, theirs: value, lower end and upper end.

    Source: square-and-add of two Wilson intervals, Newcombe 1998, method 10.
    """
    (value, low, high), (other, other_low, other_high) = ours, theirs
    middle = value - other
    return (
        middle,
        middle - math.hypot(value - low, other_high - other),
        middle + math.hypot(high - value, other - other_low),
    )


def beside(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each task, policy, budget and system of ours, with kvpress's values where it has them.

    ``difference`` is ours less kvpress's, for perplexity in nats a token; above 0 ours is better. A row
    ``is_worse`` where the whole interval is below 0.

    Args:
        records: of ``measured_points``, each with its ``system``.
    """
    theirs = {_key(one): one for one in records if one["system"] == KVPRESS}
    rows = [_row(one, theirs.get(_key(one))) for one in records if one["system"] != KVPRESS]
    order = {name: at for at, name in enumerate(TASKS)}
    return sorted(rows, key=lambda row: (order[row["task"]], row["budget"]))


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in _POINT)


def _row(own: Mapping[str, Any], their: Mapping[str, Any] | None) -> dict[str, Any]:
    row = {name: own[name] for name in (*_POINT, "system", "num_answers", "value", "value_low", "value_high")}
    row |= {**KVBytes.of_record(own).report_fields, **{name: own[name] for name in _TIMES}}
    names = ("value", "value_low", "value_high", "held_bytes", "kv_ratio", *_TIMES)
    if their is None:
        ends = ("difference", "difference_low", "difference_high")
        return row | {f"{KVPRESS}_{name}": None for name in names} | dict.fromkeys(ends) | {"is_worse": None}
    found = {**their, **KVBytes.of_record(their).report_fields}
    middle, low, high = difference(_judged(own), _judged(their))
    return {
        **row,
        **{f"{KVPRESS}_{name}": found[name] for name in names},
        "difference": middle,
        "difference_low": low,
        "difference_high": high,
        "is_worse": high < 0.0,
    }


def _judged(record: Mapping[str, Any]) -> tuple[float, float, float]:
    """Value and interval of which more is better: perplexity as log-probability of a token."""
    value, low, high = (record[name] for name in ("value", "value_low", "value_high"))
    if record["task"] != PERPLEXITY:
        return value, low, high
    return -math.log(value), -math.log(high) if high < math.inf else -math.inf, -math.log(low)


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as tables of Markdown, one for each task."""
    parts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        lines = [
            f"### {task}",
            "",
            "| kept | policy | system | value | bytes | CPU s | kvpress | bytes | CPU s | difference |",
            "| --- |" + " --- |" * 9,
        ]
        lines += [_line(row) for row in rows if row["task"] == task]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    cells = [f"{row['budget']:.0%}", row["policy"], row["system"], *_cells(row, "")]
    if row["difference"] is None:
        return "| " + " | ".join([*cells, "", "", "", ""]) + " |"
    apart = f"{row['difference']:+.3f} ({row['difference_low']:+.2f} to {row['difference_high']:+.2f})"
    return "| " + " | ".join([*cells, *_cells(row, f"{KVPRESS}_"), apart]) + " |"


def _cells(row: Mapping[str, Any], prefix: str) -> list[str]:
    value, low, high = (row[f"{prefix}{name}"] for name in ("value", "value_low", "value_high"))
    return [
        f"{value:.3f} ({low:.2f} to {high:.2f})",
        f"{row[f'{prefix}kv_ratio']:.1%}",
        f"{row[f'{prefix}cpu_s']:.1f}",
    ]
