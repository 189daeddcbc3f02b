"""``hpu-duo show-kept``: which tokens of a text each head has kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hpu_duo.cli import options as opt
from hpu_duo.cli.options import encode, grouped, load_model, read_prompts, tokenizer_of
from hpu_duo.cli.terminal import can_show, check_drawing, user_errors
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    import numpy as np

    from hpu_duo.engine.engine import Engine
    from hpu_duo.lab.kept_tokens import KeptTokens

_SHADES, _PLAIN_SHADES = " ░▒▓█", " .:*#"
"""Characters from no token of a stretch to all of them; the second row is for other encodings."""
_WIDTH, _NARROWEST, _BESIDE = 60, 10, 34
"""Characters of a line, most and fewest, and those of the columns beside it."""
SUFFIXES = (".svg", ".png")


@grouped
def show_kept(
    *,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt.")] = None,
    file: Annotated[
        str | None, typer.Option(metavar="PATH", help="File with the prompt, - for standard input.")
    ] = None,
    model: opt.Model = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap it in the model's chat template.")] = False,
    num_new_tokens: Annotated[
        int, typer.Option(help="Tokens to decode before the snapshot; 0 = after the prompt.")
    ] = 16,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write positions by layer and head.", show_default="none"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg|png", help="Also draw them; needs matplotlib.", show_default="no picture"
        ),
    ] = None,
    as_json: opt.Json = False,
    seed: opt.Seed = 0,
    engine: opt.Engine,
) -> None:
    """Read a prompt, decode some tokens, and show which positions each KV head holds then.

    A line for each head, from the first token to the newest; a character is the share of its stretch that
    is kept. Heads have the model's own numbers.
    """
    with user_errors():
        if num_new_tokens < 0:
            raise ValueError(f"expected --num-new-tokens of 0 or more, got {num_new_tokens}")
        if out is not None:
            check_file("--out", out)
        if plot is not None:
            check_drawing(plot, "--plot", SUFFIXES)
        texts = read_prompts([] if prompt is None else [prompt], [] if file is None else [file])
        if len(texts) > 1:
            raise ValueError("expected --prompt or --file, got both")
        loaded = load_model(model, engine, 1, seed)
        ids = encode(tokenizer_of(loaded), texts[0], chat)
        request_id = _add(loaded.engine, ids, num_new_tokens)
    from graphs import GraphMissError, RecompileError

    with user_errors((RecompileError, GraphMissError)):
        kept = _look(loaded.engine, request_id, len(ids) + num_new_tokens)
        if plot is not None:
            draw_kept(kept, len(ids), plot)
        fields = _fields(kept, len(ids))
        if out is not None:
            _write(out, fields)
    if as_json:
        typer.echo(json.dumps(fields))
    else:
        _show(kept, len(ids))


def _add(engine: Engine, ids: list[int], num_new_tokens: int) -> str:
    """Queue the prompt."""
    from hpu_duo.sampling import SamplingParams

    # The last sampled token has not been through the model, and with one more the request still runs.
    return engine.add_request(
        ids, SamplingParams(temperature=0.0, max_tokens=num_new_tokens + 2, ignore_eos=True)
    )


def _look(engine: Engine, request_id: str, wanted: int) -> KeptTokens:
    """Snapshot of the heads once so many tokens of prompt and output have been through the model."""
    from hpu_duo.lab.kept_tokens import kept_tokens, num_computed

    try:
        while (num_computed(engine, request_id) or 0) < wanted:
            if any(each.is_finished for each in engine.step()):
                raise ValueError("expected the request to run, but it ended: see the log for its error")
        return kept_tokens(engine, request_id)
    finally:
        engine.abort(request_id)


def _fields(kept: KeptTokens, num_prompt_tokens: int) -> dict[str, Any]:
    return {
        "num_prompt_tokens": num_prompt_tokens,
        "num_tokens": kept.num_tokens,
        "layers": [
            [{"kind": head.kind, "positions": head.positions.tolist()} for head in heads]
            for heads in kept.layers
        ],
    }


def _write(out: Path, fields: dict[str, Any]) -> None:
    try:
        out.write_text(json.dumps(fields), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror}") from error


def _show(kept: KeptTokens, num_prompt_tokens: int) -> None:
    console = Console()
    levels, border = (_SHADES, "│") if can_show(_SHADES + "│", console) else (_PLAIN_SHADES, "|")
    told = f"{num_prompt_tokens:,} tokens of the prompt and {kept.num_tokens - num_prompt_tokens:,} more"
    console.print(f"{told}, from the first to the newest", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("layer", "head", "kept positions", "tokens", "kind"):
        table.add_column(name, justify="left" if name == "kept positions" else "right", no_wrap=True)
    kinds = list(dict.fromkeys(head.kind for heads in kept.layers for head in heads))
    width = max(_NARROWEST, min(_WIDTH, console.width - _BESIDE))
    for layer, heads in enumerate(kept.layers):
        for number, head in enumerate(heads):
            shades = heat_line(head.positions, kept.num_tokens, levels, width)
            place = (str(layer) if number == 0 else "", str(number))
            count = f"{len(head.positions):,}"
            table.add_row(*place, border + shades + border, count, str(kinds.index(head.kind) + 1))
    console.print(table)
    for number, kind in enumerate(kinds, start=1):
        console.print(f"kind {number}: {kind}", highlight=False, markup=False)


def heat_line(positions: np.ndarray, num_tokens: int, levels: str = _SHADES, width: int = _WIDTH) -> str:
    """Draw positions as characters, one for each stretch of the text.

    Args:
        positions: different ones, below ``num_tokens``.
        levels: characters from no token to all tokens of a stretch; the last one is for all, and the
            first for none only.
        width: most characters; a shorter text has one for each token.
    """
    import numpy as np

    edges = np.linspace(0, num_tokens, min(width, num_tokens) + 1).astype(int)
    counts, sizes = np.histogram(positions, np.append(edges[:-1], num_tokens))[0], np.diff(edges)
    most = len(levels) - 1
    ranks = np.ceil(counts / sizes * (most - 1)).astype(int) + (counts == sizes)
    return "".join(levels[rank] for rank in ranks)


_KEPT, _PROMPT_END = "#1b6ca8", "#d1495b"
_ROW_INCHES = 0.12
_MOST_INCHES = 40.0


def draw_kept(kept: KeptTokens, num_prompt_tokens: int, file: Path) -> None:
    """Write the picture, a row for each head and a line where the prompt ends; PNG or SVG by the name.

    Equal results give equal files with one version of matplotlib.

    Raises:
        ValueError: the file cannot be written.
    """
    import matplotlib
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    rows = [head for heads in kept.layers for head in heads]
    held = np.zeros((len(rows), kept.num_tokens), dtype=np.uint8)
    for row, head in zip(held, rows):
        row[head.positions] = 1
    height = min(_MOST_INCHES, max(2.2, _ROW_INCHES * len(rows) + 1.2))
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(
        held,
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap(["white", _KEPT]),
        vmin=0,
        vmax=1,
    )
    axes.axvline(num_prompt_tokens - 0.5, color=_PROMPT_END, linewidth=1.0, label="end of the prompt")
    starts = np.cumsum([0, *(len(heads) for heads in kept.layers)])
    for start in starts[1:-1]:
        axes.axhline(start - 0.5, color="#b0b0b0", linewidth=0.6)
    axes.set_yticks((starts[:-1] + starts[1:] - 1) / 2, [str(layer) for layer in range(len(kept.layers))])
    axes.set_ylabel("layer, and its KV heads from the top")
    axes.set_xlabel("position")
    axes.set_title(f"positions kept of {kept.num_tokens:,} tokens", fontsize=10)
    axes.legend(loc="upper right", fontsize=8)
    try:
        # The same result gives the same file: no date, no random names.
        with matplotlib.rc_context({"svg.hashsalt": "hpu-duo"}):
            metadata = {"Date": None} if file.suffix.lower() == ".svg" else {"Software": None}
            figure.savefig(file, dpi=110, metadata=metadata)
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror}") from error
