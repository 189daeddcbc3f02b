"""``hpu-duo identify``: find the KV heads of a model that need the whole context."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hpu_duo.cli.arguments.options import Json, Model, grouped
from hpu_duo.cli.heads.identify_options import (
    DocumentOptions,
    RunOptions,
    TrainingOptions,
    WindowOptions,
    request_of,
)
from hpu_duo.cli.heads.views import heads_table, pattern_fields
from hpu_duo.cli.terminal.errors import INTERRUPTED, user_errors
from hpu_duo.extras import install_command

if TYPE_CHECKING:
    from hpu_duo.heads import HeadPattern
    from hpu_duo.lab.identify import IdentifyRequest


@grouped
def identify(
    *,
    output: Annotated[Path, typer.Option(help="Directory for the pattern; nothing in it is overwritten.")],
    model: Model = None,
    method: Annotated[
        str, typer.Option(help="optimise, or one of the cheaper profile, retrieval-score and mean-qk.")
    ] = "optimise",
    documents: DocumentOptions,
    window: WindowOptions,
    training: TrainingOptions,
    run: RunOptions,
    as_json: Json = False,
) -> None:
    """Score the KV heads of a model, and write its head pattern and a heat map.

    Runs alone, or in several processes that share each batch: --num-processes on one machine, or torchrun
    --nproc-per-node 2 -m hpu_duo.cli identify ... The built-in model takes one to three minutes of
    a CPU core.
    """
    with user_errors():
        run.check()
        # torch is slow to import: what can be refused without it comes first.
        from hpu_duo.cli.heads.run import ToldInterruptError, identifier
        from hpu_duo.device import Refused, WorkerError

        request = request_of(model, output, method, documents, window, training, run)
        start = identifier(request, run.threads, run.num_processes)
    with user_errors(Refused):
        try:
            pattern = start()
        except WorkerError as error:
            typer.echo(f"hpu-duo: {error}", err=True)
            raise typer.Exit(1) from None
        except ToldInterruptError:
            raise typer.Exit(INTERRUPTED) from None
    if pattern is not None:
        _show(request, pattern, as_json)


def _show(request: IdentifyRequest, pattern: HeadPattern, as_json: bool) -> None:
    from hpu_duo.lab.identify.identification import PICTURE_FILE

    cuts = {"> 0.5": pattern.binarise(threshold=0.5), "at 0.5": pattern.binarise(sparsity=0.5)}
    picture = None
    if find_spec("matplotlib") is not None:
        from hpu_duo.cli.heads.views import draw_heads

        picture = request.output / PICTURE_FILE
        title = f"{pattern.config['model_name']}, {request.method.value}, framed: score > 0.5"
        draw_heads([(title, cuts["> 0.5"])], picture)
    else:
        typer.echo(f"no heat map: matplotlib is not installed ({install_command('plot')})", err=True)
    if as_json:
        fields = {"output": str(request.output), "picture": picture and str(picture)}
        typer.echo(json.dumps({**fields, **pattern_fields(pattern, cuts)}, indent=2))
        return
    console = Console()
    console.print("retrieval heads: scores above 0.5, and the better half of all", highlight=False)
    console.print(heads_table(pattern, cuts, console))
    names = "full_attention_heads.tsv, config.json" + (f", {PICTURE_FILE}" if picture else "")
    console.print(f"\n{request.output}: {names}", highlight=False)
