"""``hpu-duo quantise``: write a checkpoint with quantised weights from a plain one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hpu_duo.cli import options as opt
from hpu_duo.cli.options import model_argument
from hpu_duo.cli.terminal import show_bytes, user_errors


def quantise(
    model: Annotated[Path, model_argument("Directory with a plain checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty directory.")],
    format: Annotated[str, typer.Option(metavar="NAME", help="Format of the weights: int8, int4 or fp8.")],
    as_json: opt.Json = False,
) -> None:
    """Round the linear layers of a checkpoint to codes, and write it in the files of compressed-tensors.

    To the nearest code, without data: int8 and fp8 with a scale of each output, int4 with one of 128 inputs
    of an output. Embedding table, output head and routers of experts stay plain, and so do experts in one
    tensor. Weights are read and written one after the other.
    """
    with user_errors((ValueError, OSError)):
        from hpu_duo.modeling.quantised.writer import quantise_checkpoint

        written = quantise_checkpoint(model, out, format)
    if as_json:
        typer.echo(json.dumps(asdict(written)))
        return
    typer.echo(
        f"{out}: {written.num_quantised} linear layers in {format}, {len(written.plain)} other matrices "
        f"plain, {show_bytes(written.num_bytes)}"
    )
