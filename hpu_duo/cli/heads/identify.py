"""``hpu-duo identify``: find the KV heads of a model that need the whole context."""

from __future__ import annotations

import json
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.cli.arguments.options import Json, Model
from hpu_duo.cli.heads.view import heads_table, pattern_fields
from hpu_duo.cli.terminal.errors import INTERRUPTED, user_errors

if TYPE_CHECKING:
    from hpu_duo.heads import HeadPattern
    from hpu_duo.identify import IdentifyRequest

_DATA = "Documents"
_HEADS = "Heads"
_TRAINING = "Training (method optimise)"
_RUN = "Run"

Choice = TypeVar("Choice", bound=Enum)


def identify(
    output: Annotated[Path, typer.Option(help="Directory for the pattern; nothing in it is overwritten.")],
    model: Model = None,
    method: Annotated[
        str, typer.Option(help="optimise, or one of the cheaper profile and mean-qk.")
    ] = "optimise",
    haystack: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text that passkeys are hidden in.",
            show_default="built-in text",
            rich_help_panel=_DATA,
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            help="How passkeys are told and asked for: ordinals, or names as the built-in model knows it.",
            show_default="ordinals, or names with the built-in model",
            rich_help_panel=_DATA,
        ),
    ] = None,
    min_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the shortest document.", show_default="1000, or 512", rich_help_panel=_DATA
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the longest document, without the questions.",
            show_default="32000, or 1024",
            rich_help_panel=_DATA,
        ),
    ] = None,
    num_lengths: Annotated[
        int, typer.Option(help="Distinct lengths between the two.", rich_help_panel=_DATA)
    ] = 50,
    num_passkeys: Annotated[
        int | None,
        typer.Option(help="Passkeys of a document.", show_default="10, or 8", rich_help_panel=_DATA),
    ] = None,
    passkey_words: Annotated[
        int | None, typer.Option(help="Words of a passkey.", show_default="32, or 8", rich_help_panel=_DATA)
    ] = None,
    min_depth: Annotated[
        float, typer.Option(help="Share of the text before the first passkey.", rich_help_panel=_DATA)
    ] = 0.05,
    max_depth: Annotated[
        float, typer.Option(help="Share of the text before the last one.", rich_help_panel=_DATA)
    ] = 0.95,
    label_questions: Annotated[
        bool,
        typer.Option(
            "--label-questions", help="Count tokens of questions as well, as the published code does."
        ),
    ] = False,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Documents of profile and mean-qk.", show_default="50, or 16", rich_help_panel=_DATA
        ),
    ] = None,
    sink: Annotated[
        int | None,
        typer.Option(
            help="First tokens that streaming heads keep.", show_default="128, or 16", rich_help_panel=_HEADS
        ),
    ] = None,
    recent: Annotated[
        int | None,
        typer.Option(
            help="Newest tokens that streaming heads keep.", show_default="256, or 64", rich_help_panel=_HEADS
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Optimiser steps.", show_default="2000, or 100", rich_help_panel=_TRAINING),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Documents of a step, over all processes.", rich_help_panel=_TRAINING)
    ] = 1,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", rich_help_panel=_TRAINING)] = 0.02,
    reg_weight: Annotated[
        float, typer.Option(help="Weight of the L1 of the gates.", rich_help_panel=_TRAINING)
    ] = 0.05,
    loss: Annotated[
        str,
        typer.Option(
            help="mean: averages, as the published code; sum: sums, as the paper.", rich_help_panel=_TRAINING
        ),
    ] = "mean",
    full_from: Annotated[
        str,
        typer.Option(
            help="Full attention that gates mix in: teacher's, as the published code; own, as the paper.",
            rich_help_panel=_TRAINING,
        ),
    ] = "teacher",
    save_every: Annotated[
        int, typer.Option(help="Steps between two saved states.", rich_help_panel=_TRAINING)
    ] = 50,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the state in the output directory, if there is one."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Fixes the documents.", rich_help_panel=_RUN)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or hpu.", rich_help_panel=_RUN)] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            help="auto (the checkpoint's), float32, bfloat16 or float16.",
            show_default="auto, or float32 with the built-in model",
            rich_help_panel=_RUN,
        ),
    ] = "",
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads of a process.", show_default="torch's choice", rich_help_panel=_RUN),
    ] = None,
    num_processes: Annotated[
        int | None,
        typer.Option(
            help="Start so many processes, each with a device of its own, that share the documents.",
            show_default="this one alone",
            rich_help_panel=_RUN,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Score the KV heads of a model, and write its head pattern and a heat map.

    Runs alone, or in several processes that share each batch: --num-processes on one machine, or torchrun
    --nproc-per-node 2 -m hpu_duo.cli identify ... The built-in model takes a minute or two on one CPU core.
    """
    is_builtin = model is None
    with user_errors():
        from hpu_duo.cli.heads.run import ToldInterruptError, identifier
        from hpu_duo.device import Refused, WorkerError
        from hpu_duo.identify import (
            DatasetSettings,
            Form,
            FullFrom,
            IdentifyRequest,
            LossForm,
            Method,
            Schedule,
            TrainingSettings,
        )

        if threads is not None and threads < 1:
            raise ValueError(f"expected --threads of at least 1, got {threads}")

        def pick(given: int | None, general: int, builtin: int) -> int:
            return given if given is not None else builtin if is_builtin else general

        request = IdentifyRequest(
            model=MODEL_DIR if model is None else model,
            output=output,
            method=_choice(Method, "--method", method),
            dataset=DatasetSettings(
                min_length=pick(min_length, 1000, 512),
                max_length=pick(max_length, 32000, 1024),
                num_lengths=num_lengths,
                num_passkeys=pick(num_passkeys, 10, 8),
                passkey_words=pick(passkey_words, 32, 8),
                min_depth=min_depth,
                max_depth=max_depth,
                label_questions=label_questions,
                form=_choice(Form, "--form", form or ("names" if is_builtin else "ordinals")),
                seed=seed,
            ),
            haystack=haystack,
            sink=pick(sink, 128, 16),
            recent=pick(recent, 256, 64),
            training=TrainingSettings(
                schedule=Schedule(lr=lr, num_steps=pick(steps, 2000, 100)),
                penalty_weight=reg_weight,
                loss=_choice(LossForm, "--loss", loss),
                full_from=_choice(FullFrom, "--full-from", full_from),
                batch_size=batch_size,
                save_every=save_every,
            ),
            num_samples=pick(samples, 50, 16),
            dtype=dtype or ("float32" if is_builtin else "auto"),
            device=device,
            resume=resume,
        )
        start = identifier(request, threads, num_processes)
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


def _choice(names: type[Choice], option: str, text: str) -> Choice:
    known = [str(one.value) for one in names]
    if text not in known:
        raise ValueError(f"expected {option} to be one of {', '.join(known)}, got {text!r}")
    return names(text)


def _show(request: IdentifyRequest, pattern: HeadPattern, as_json: bool) -> None:
    from hpu_duo.identify.identification import PICTURE_FILE

    picture = None
    if find_spec("matplotlib") is not None:
        from hpu_duo.cli.heads.plot import draw_heads

        picture = request.output / PICTURE_FILE
        draw_heads([(f"{pattern.config['model_name']}, {request.method.value}", pattern)], picture)
    else:
        typer.echo("no heat map: matplotlib is not installed (pip install 'hpu-duo[plot]')", err=True)
    cuts = {"> 0.5": pattern.binarise(threshold=0.5), "at 0.5": pattern.binarise(sparsity=0.5)}
    if as_json:
        fields = {"output": str(request.output), "picture": picture and str(picture)}
        typer.echo(json.dumps({**fields, **pattern_fields(pattern, cuts)}, indent=2))
        return
    console = Console()
    console.print("retrieval heads: scores above 0.5, and the better half of all", highlight=False)
    console.print(heads_table(pattern, cuts, console))
    names = "full_attention_heads.tsv, config.json" + (f", {PICTURE_FILE}" if picture else "")
    console.print(f"\n{request.output}: {names}", highlight=False)
