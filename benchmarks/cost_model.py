"""Errors of the Gaudi cost model on published speeds that it was not fitted to.

    python benchmarks/cost_model.py --out benchmarks/results/cost-model.md

Fits the efficiencies to one half of the rows of ``hpu_duo/planning/published.json``, as ``split_rows``
divides them, and compares the constants in use with the other half. Takes a second, needs no accelerator, and
measures none.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hpu_duo.planning import (
    ERROR_FACTORS,
    FITTED,
    PUBLISHED_LAYER_LAUNCHES,
    Efficiency,
    Format,
    PublishedRow,
    published_rows,
    published_sources,
    split_rows,
)
from hpu_duo.planning.fit import (
    fit,
    leave_one_model_out,
    median_error,
    relative_error,
    worst_factor,
    worst_unseen,
)

AIM = 0.25


def report() -> str:
    """The whole report, as markdown."""
    fitted, held_out = split_rows(published_rows())
    error = median_error(held_out, FITTED)
    swapped = median_error(fitted, fit(held_out))
    lines = [
        "# The Gaudi cost model against published speeds",
        "",
        "Made by `python benchmarks/cost_model.py --out benchmarks/results/cost-model.md`. The model and its",
        "assumptions are in `docs/cost-model.md`. This project has not measured any Gaudi: the figures are",
        "those of others, and the model is made from public sources.",
        "",
        f"**Held out: median absolute error {error:.1%}** over {len(held_out)} rows; the aim was at most "
        f"{AIM:.0%}.",
        "",
        f"Fitted rows: {median_error(fitted, FITTED):.1%} over {len(fitted)}. Halves swapped, so fitted to",
        f"the held-out rows and tested on the fitted ones: {swapped:.1%}.",
        "",
        "## By hardware and kind",
        "",
        "| rows | held out | median | largest | fitted | median | largest |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(_group_line(name, held_out, fitted) for name in _group_names(held_out + fitted)),
        "",
        "First token is the latency of one prompt; throughput is that of a whole batch, prompts included.",
        "",
        "## Constants",
        "",
        "| | compute | memory | link | launch of a layer |",
        "| --- | ---: | ---: | ---: | ---: |",
        _constants_line("in use", FITTED),
        _constants_line("fit of the fitted half", fit(fitted)),
        _constants_line("fit of the held-out half", fit(held_out)),
        _constants_line("fit of all rows", fit(published_rows())),
        "",
        "The last two tell how sure each constant is, and are not used. Link and launch are the least",
        "certain: few rows spend much time on either, and only two models ran on several devices.",
        "",
        f"A layer of the published runs is taken to launch {PUBLISHED_LAYER_LAUNCHES} operators, as many as",
        "a plain decode of the portable kernels.",
        "",
        "## Formats, and the width of ranges",
        "",
        *_format_lines(held_out),
        "",
        "## A model that no fit has seen",
        "",
        "Each model's rows, predicted with a fit of all rows of the other models (median absolute error):",
        "",
        "| model | rows | median |",
        "| --- | ---: | ---: |",
        *_left_out_lines(),
        "",
        "## All held-out rows",
        "",
        "| kind | hardware | model | devices | input | output | batch | published | predicted | error |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *map(_row_line, held_out),
        "",
        "## All fitted rows",
        "",
        "| kind | hardware | model | devices | input | output | batch | published | predicted | error |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *map(_row_line, fitted),
        "",
        "## Sources",
        "",
        *(f"- `{tag}`: {what}" for tag, what in published_sources().items()),
        "",
    ]
    return "\n".join(lines)


def _format_lines(held_out: Sequence[PublishedRow]) -> list[str]:
    rows = published_rows()
    num_fp8 = sum(row.format is Format.FP8 for row in rows)
    fp8, bf16 = ERROR_FACTORS[Format.FP8], ERROR_FACTORS[Format.BF16]
    return [
        f"{num_fp8} of the {len(rows)} rows are of fp8, and the one of bf16 is in the fitted half, so that",
        "no figure tests the format that is the default. Ranges of predictions are therefore wider in bf16:",
        "",
        "| format | factor either way, in use | from | computed |",
        "| --- | ---: | --- | ---: |",
        f"| fp8 | {fp8:.2f} | the worst held-out row | {worst_factor(held_out, FITTED):.2f} |",
        f"| bf16 | {bf16:.2f} | the worst row of a model that no fit has seen | {worst_unseen(rows):.2f} |",
    ]


def _group_names(rows: Sequence[PublishedRow]) -> list[tuple[str, str]]:
    return sorted({(row.hardware.title, row.kind) for row in rows})


def _group_line(
    name: tuple[str, str], held_out: Sequence[PublishedRow], fitted: Sequence[PublishedRow]
) -> str:
    mine, theirs = (
        [row for row in rows if (row.hardware.title, row.kind) == name] for rows in (held_out, fitted)
    )
    cells = (", ".join(name), *_error_cells(mine), *_error_cells(theirs))
    return f"| {' | '.join(cells)} |"


def _error_cells(rows: Sequence[PublishedRow]) -> tuple[str, str, str]:
    if not rows:
        return "0", "-", "-"
    largest = max(abs(relative_error(row, FITTED)) for row in rows)
    return str(len(rows)), f"{median_error(rows, FITTED):.1%}", f"{largest:.1%}"


def _constants_line(name: str, efficiency: Efficiency) -> str:
    values = asdict(efficiency)
    launch = values.pop("launch_s") * PUBLISHED_LAYER_LAUNCHES
    return f"| {name} | {' | '.join(f'{value:.3f}' for value in values.values())} | {launch * 1e6:.0f} µs |"


def _left_out_lines() -> list[str]:
    rows = published_rows()
    return [
        f"| {name} | {sum(row.model.name == name for row in rows)} | {error:.1%} |"
        for name, error in leave_one_model_out(rows).items()
    ]


def _row_line(row: PublishedRow) -> str:
    error = relative_error(row, FITTED)
    figure, unit = (row.tokens_per_s, "tokens/s") if row.latency_ms is None else (row.latency_ms, "ms")
    assert figure is not None, "a row has one figure or the other"
    cells = (
        row.kind,
        row.hardware.title,
        row.model.name,
        str(row.num_devices),
        str(row.input_len),
        str(row.output_len),
        f"{row.batch:,}",
        f"{figure:,g} {unit}" if figure < 1000 else f"{figure:,.0f} {unit}",
        f"{figure * (1 + error):,.4g} {unit}" if figure < 1000 else f"{figure * (1 + error):,.0f} {unit}",
        f"{error:+.0%}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the report, or write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the report there instead of printing it")
    out = parser.parse_args().out
    if out is None:
        print(report())
    else:
        out.write_text(report(), encoding="utf-8")


if __name__ == "__main__":
    main()
