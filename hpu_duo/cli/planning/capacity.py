"""``hpu-duo capacity``: requests that fit on a Gaudi, and predicted speed, from a config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpu_duo.cli.arguments.options import LIMITS, Json, Kept, grouped, of_setting
from hpu_duo.cli.arguments.values import model_option
from hpu_duo.cli.planning.hardware import HardwareOptions, report_fields
from hpu_duo.cli.terminal.drawing import check_drawing
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.config.limits import CARD_LIMITS, CacheConfig, SchedulerConfig


@grouped
def capacity(
    *,
    model: Annotated[
        Path,
        model_option("Directory with a config.json, or the file; no weights needed.", needs_weights=False),
    ],
    hardware: Annotated[str, typer.Option(help="gaudi2 or gaudi3.")] = "gaudi3",
    retrieval_parallel: Annotated[
        str,
        typer.Option(
            help="What devices share of retrieval heads: heads, or the tokens of each of them (context).",
            metavar="heads|context",
        ),
    ] = "heads",
    served: HardwareOptions,
    kept: Kept,
    block_size: Annotated[int, of_setting("block_size")] = CacheConfig.block_size,
    max_num_seqs: Annotated[
        int, typer.Option(help="Requests that run at once even if more fit.", rich_help_panel=LIMITS)
    ] = CARD_LIMITS.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, of_setting("max_num_batched_tokens")
    ] = CARD_LIMITS.max_num_batched_tokens,
    png: Annotated[
        Path | None, typer.Option(help="Also draw it; needs matplotlib.", show_default="no picture")
    ] = None,
    as_json: Json = False,
) -> None:
    """Requests that fit and predicted speed on Gaudi, against context, sparsity and KV format.

    Computed from public figures of Gaudi 2 and 3; this project has not measured any Gaudi.
    """
    with user_errors():
        if png is not None:
            check_drawing(png)
        if retrieval_parallel not in ("heads", "context"):
            # What "auto" takes depends on the length, and every length is shown here.
            raise ValueError(f"expected --retrieval-parallel heads or context, got {retrieval_parallel!r}")
        serving = served.on(
            hardware,
            SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
            block_size,
            kept,
            retrieval_parallel,
        )
        # transformers is slow to import: everything that can be refused without it comes first.
        from hpu_duo.planning.read_model import read_model

        size = read_model(model)
        found = served.compare(size, serving)
        if png is not None:
            from hpu_duo.cli.planning.plot import draw

            draw(size, serving, found, png)
    if as_json:
        typer.echo(json.dumps(report_fields(size, serving, found), indent=2))
    else:
        from hpu_duo.cli.planning.tables import print_report

        print_report(size, serving, found)
