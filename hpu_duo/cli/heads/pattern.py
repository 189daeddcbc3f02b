"""``hpu-duo pattern show``: a head pattern, cut at some sparsities, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from hpu_duo.cli.options import Json, model_option
from hpu_duo.cli.terminal import check_drawing, user_errors

if TYPE_CHECKING:
    from hpu_duo.heads import HeadPattern

DEFAULT_SPARSITIES = (0.25, 0.5, 0.75)

app = typer.Typer(help="Inspect head patterns.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    "Inspect head patterns."


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(help="Head pattern in DuoAttention's published format.")],
    sparsity: Annotated[
        list[float] | None,
        typer.Option(help="Shares of KV heads that stream; repeatable.", show_default="0.25, 0.5, 0.75"),
    ] = None,
    threshold: Annotated[
        list[float] | None, typer.Option(help="Instead: heads with a higher score retrieve.")
    ] = None,
    tie_break: Annotated[
        str, typer.Option(help="stable, or reference: the published rule, with noise from --tie-seed.")
    ] = "stable",
    tie_seed: Annotated[int, typer.Option(help="Seed of numpy for --tie-break reference.")] = 0,
    balance: Annotated[str, typer.Option(help="global or per_layer.")] = "global",
    model: Annotated[
        Path | None,
        model_option(
            "Check that the pattern was made for this checkpoint; a config.json shows its shape.",
            needs_weights=False,
        ),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Also draw it; needs matplotlib.", show_default="no picture")
    ] = None,
    as_json: Json = False,
) -> None:
    """Retrieval heads of each layer at some sparsities, and the scores as a heat map."""
    with user_errors():
        if png is not None:
            check_drawing(png)
        from hpu_duo.heads import HeadPattern

        pattern = HeadPattern.load(directory)
        note = None if model is None else _check_model(pattern, model)
        rule = cast(Literal["stable", "reference"], tie_break)
        spread = cast(Literal["global", "per_layer"], balance)
        cuts: dict[str, HeadPattern] = {}
        if not threshold:
            for share in sparsity or DEFAULT_SPARSITIES:
                cuts[f"at {share:.4g}"] = pattern.binarise(
                    sparsity=share, tie_break=rule, seed=tie_seed, balance=spread
                )
        elif sparsity:
            raise ValueError("expected --sparsity or --threshold, got both")
        for value in threshold or ():
            cuts[f"> {value:.4g}"] = pattern.binarise(threshold=value, tie_break=rule, balance=spread)
        if png is not None:
            from hpu_duo.cli.heads.views import draw_heads

            what = "framed: score" if threshold else "streaming"
            draw_heads([(f"{directory.name}, {what} {name}", cut) for name, cut in cuts.items()], png)
    from hpu_duo.cli.heads.views import heads_table, pattern_fields

    if as_json:
        told = {} if note is None else {"note": note}
        typer.echo(json.dumps({**pattern_fields(pattern, cuts), **told}, indent=2))
    else:
        from rich.console import Console

        sizes = f"{pattern.num_layers} layers x {pattern.num_kv_heads} KV heads"
        console = Console()
        console.print(f"{directory}: {sizes}, sink {pattern.sink}, recent {pattern.recent}", highlight=False)
        what = "above each threshold" if threshold else "at each share of streaming heads"
        console.print(f"retrieval heads of each layer {what}:", highlight=False)
        console.print(heads_table(pattern, cuts, console))
        if note is not None:
            console.print(f"note: {note}", highlight=False)


def _check_model(pattern: HeadPattern, model: Path) -> str | None:
    """Return ``check_origin``'s note about a pattern and a model."""
    # transformers is slow to import, and only this needs it.
    from hpu_duo.heads.pattern import check_origin
    from hpu_duo.modeling.hub import has_weights, model_fingerprint, model_name
    from hpu_duo.planning.read_model import read_model

    sizes = read_model(model)
    pattern.check_shape(len(set(sizes.sources)), sizes.layers[0].num_kv_heads)
    directory = model if model.is_dir() else model.parent
    fingerprint = model_fingerprint(directory) if has_weights(directory) else None
    return check_origin(pattern, model_name(directory), fingerprint)
