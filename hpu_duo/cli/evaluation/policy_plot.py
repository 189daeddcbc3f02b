"""Picture of policies of the KV cache: one panel for each task, one line for each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpu_duo.cli.evaluation.plot import BAR, COLOURS, MARKERS, new_figure, save

_TITLES = {
    "passkey": "passkeys",
    "rehearsed": "passkeys asked for before",
    "perplexity": "perplexity (lower is better)",
    "ruler": "RULER's tasks, our texts",
}
_LABELS = {"perplexity": "perplexity", "passkey": "exact answers", "rehearsed": "exact answers"}
_WIDEST, _NARROWEST = 5.0, 1.2
"""Widths of the first line and of the last one: a line that lies under another one shows at its edges."""


def draw_policies(rows: Sequence[Mapping[str, Any]], png: Path) -> None:
    """Write values against bytes held; bars are 95 % intervals, full attention is a level line.

    Lines get narrower from the first to the last, so that those with the same values are all seen.

    Raises:
        ResultsNotWrittenError: the file cannot be written.
    """
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    policies = sorted(dict.fromkeys(row["policy"] for row in rows), key=lambda policy: policy == "full")
    figure = new_figure((1.0 + 4.4 * len(tasks), 4.6))
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        for number, policy in enumerate(policies):
            found = [row for row in rows if row["task"] == task and row["policy"] == policy]
            found.sort(key=lambda row: row["kv_ratio"])
            values = [row["value"] for row in found]
            colour = COLOURS[number % len(COLOURS)]
            if policy == "full":
                axes.axhline(values[0], color="#4d4d4d", linestyle="--", label="full attention")
                continue
            bars = (
                [row["value"] - row["value_low"] for row in found],
                [row["value_high"] - row["value"] for row in found],
            )
            line = MARKERS[number % len(MARKERS)] + "-"
            kept = [row["kv_ratio"] for row in found]
            width = _WIDEST - (_WIDEST - _NARROWEST) * number / max(1, len(policies) - 1)
            style = {"linewidth": width, "markersize": 4 + width, "zorder": 2 + number / len(policies)}
            axes.errorbar(kept, values, bars, fmt=line, color=colour, label=policy, **style, **BAR)
        axes.set_xlabel("KV bytes kept / bytes of the full cache")
        axes.set_ylabel(_LABELS.get(task, "score"))
        axes.set_title(_TITLES.get(task, task), fontsize=10)
        axes.grid(alpha=0.3)
        if task != "perplexity":
            axes.set_ylim(-0.03, 1.03)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    save(figure, png)
