"""``hpu-duo eval``: the cost of a head pattern in accuracy, and the bytes it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hpu_duo.cli import options as opt
from hpu_duo.cli.evaluation import options as eopt
from hpu_duo.cli.evaluation.curves import curve, kvpress
from hpu_duo.cli.evaluation.questions import longbench, longbench_v2, ruler
from hpu_duo.cli.evaluation.report import (
    KV_COLUMNS,
    Evaluation,
    Measure,
    Records,
    Report,
    SimulatedDecodes,
    ask_full_attention,
    check_simulated_decodes,
    show,
)
from hpu_duo.cli.options import ManyValues, grouped
from hpu_duo.cli.terminal import check_matplotlib, user_errors
from hpu_duo.extras import install_command

eval_app = typer.Typer(
    help="Measure accuracy and KV bytes, everything through the decode path.", no_args_is_help=True
)
eval_app.command(cls=ManyValues)(ruler)
eval_app.command(cls=ManyValues)(longbench)
eval_app.command(name="longbench-v2")(longbench_v2)
eval_app.command(cls=ManyValues)(curve)
eval_app.command(cls=ManyValues)(kvpress)

_PASSKEY_COLUMNS = ("num_answers", "num_exact", "accuracy", "token_accuracy", "logprob", *KV_COLUMNS)


@eval_app.command()
@grouped
def passkey(
    *,
    num_tokens: Annotated[int, typer.Option(help="Length of a document.")] = 2000,
    num_documents: eopt.NumDocuments = 4,
    num_passkeys: eopt.NumPasskeys = 8,
    passkey_words: eopt.PasskeyWords = 16,
    rehearsals: eopt.NumRehearsals = None,
    simulated_decodes: SimulatedDecodes = 1,
    text: eopt.TextOptions,
    model: opt.Model = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
    engine: eopt.Scoring,
) -> None:
    """Share of passkeys that are found word for word."""
    with user_errors():
        from hpu_duo.lab.eval import PasskeyQuestions, PasskeyResult, PasskeyTask

        check_simulated_decodes(simulated_decodes)
        task = PasskeyTask(
            num_tokens,
            num_documents,
            num_passkeys,
            passkey_words,
            seed,
            text=text.read(model),
            rehearsals=eopt.rehearsed(rehearsals),
            num_decoded=simulated_decodes,
        )
        choice = eopt.Choice(model, engine)

    def prepare() -> Measure:
        subject = choice.load()
        questions = PasskeyQuestions.write(subject, task)
        return lambda _: [questions.ask(subject).record_fields]

    def report(records: Records) -> Report:
        result = PasskeyResult.of_record(records[0])
        control = ask_full_attention({num_tokens: result}, {num_tokens: [task]}, choice.load_full)
        row = {"num_tokens": num_tokens, **result.report_fields}
        return Report([row], ("num_tokens", *_PASSKEY_COLUMNS), {**row, "full_attention": control})

    Evaluation("passkey", choice.settings, prepare, report).run(None, as_json)


@eval_app.command(cls=ManyValues)
@grouped
def niah(
    *,
    out: eopt.Directory,
    lengths: Annotated[list[int], typer.Option(help="Lengths of the documents.")] = [512, 1000, 2000, 4000],  # noqa: B006
    depths: Annotated[list[float], typer.Option(help="Depths of the needle, 0 to 1.")] = [  # noqa: B006
        0.0,
        0.25,
        0.5,
        0.75,
        1.0,
    ],
    num_documents: eopt.NumDocuments = 4,
    passkey_words: eopt.PasskeyWords = 16,
    simulated_decodes: SimulatedDecodes = 1,
    text: eopt.TextOptions,
    model: opt.Model = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
    engine: eopt.Scoring,
) -> None:
    """Find one needle at every depth of every length; draws a heat map and can be resumed."""
    with user_errors():
        check_matplotlib("the heat map")
        from hpu_duo.cli.evaluation.report import draw_grid
        from hpu_duo.lab.eval import NeedleGrid, PasskeyResult

        check_simulated_decodes(simulated_decodes)
        grid = NeedleGrid(
            tuple(lengths),
            tuple(depths),
            num_documents,
            passkey_words,
            seed,
            text.read(model),
            simulated_decodes,
        )
        choice = eopt.Choice(model, engine)

    def settings() -> dict[str, Any]:
        own = {"num_documents": num_documents, "passkey_words": passkey_words, "seed": seed}
        own |= {"simulated_decodes": simulated_decodes}
        return {**choice.settings(), **own, **eopt.text_settings(grid.text)}

    def prepare() -> Measure:
        subject = choice.load()
        grid.check(subject)
        return lambda results: grid.fill(subject, results)

    def report(cells: Records) -> Report:
        rows = [
            {name: cell[name] for name in ("num_tokens", "depth")}
            | PasskeyResult.of_record(cell).report_fields
            for cell in cells
        ]
        draw_grid(rows, out / "heatmap.png")
        control = ask_full_attention(grid.by_length(cells), grid.tasks, choice.load_full)
        columns = ("num_tokens", "depth", *_PASSKEY_COLUMNS)
        return Report(rows, columns, {"cells": rows, "full_attention": control})

    Evaluation("niah", settings, prepare, report, ("heatmap.png",)).run(out, as_json)


@eval_app.command()
@grouped
def perplexity(
    *,
    file: Annotated[
        Path | None, typer.Option(help="UTF-8 text.", show_default="text of the built-in language")
    ] = None,
    num_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of the text.", show_default="what the model holds")
    ] = None,
    prefix: Annotated[int, typer.Option(help="Tokens to prefill and not to score.")] = 1,
    window: Annotated[int, typer.Option(help="Scored tokens of one line of the report.")] = 256,
    model: opt.Model = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
    engine: eopt.OneText,
) -> None:
    """Perplexity of a text, every token scored by decoding it from the cache."""
    with user_errors():
        if num_tokens is not None and num_tokens < 1:
            raise ValueError(f"expected --num-tokens of at least 1, got {num_tokens}")
        from hpu_duo.cli.options import read_prompts
        from hpu_duo.lab.eval import check_stream, stream_perplexity
        from hpu_duo.lab.tasks.passkeys import document

    choice = eopt.Choice(model, engine)

    def prepare() -> Measure:
        subject = choice.load(1)
        # A text longer than the model is refused, not cut, unless the user says where to cut.
        if file is None:
            subject.check_lengths([num_tokens or 1], "a text")
            text = document(subject.count, (num_tokens or 2000) + 100, 0, 1, seed).text
        else:
            (text,) = read_prompts([], [str(file)])
        ids = subject.encode(text, is_start=True)[:num_tokens]
        check_stream(subject, ids, prefix, window)
        return lambda _: [{"found": stream_perplexity(subject, ids, prefix, window)}]

    def report(records: Records) -> Report:
        result = records[0]["found"]
        rows = [
            {"from_token": first, "perplexity": value, **kv.report_fields}
            for (first, value), kv in zip(result.by_position, result.kv, strict=True)
        ]
        whole = {"perplexity": result.perplexity, **result.kv[-1].report_fields}
        lines = [*rows, {"from_token": "all", **whole}]
        fields = {"num_tokens": result.num_tokens, **whole, "windows": rows}
        columns = ("from_token", "perplexity", *KV_COLUMNS)
        return Report(lines, columns, fields, "KV: at the end of the line's tokens.")

    Evaluation("perplexity", choice.settings, prepare, report).run(None, as_json)


@eval_app.command(name="lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lm_eval(ctx: typer.Context) -> None:
    """Run the lm-evaluation-harness, where --model hpu-duo names this package; arguments are its own.

    For example: hpu-duo eval lm-eval run --model hpu-duo --model_args pretrained=DIR,sparsity=0.5 --tasks ...
    """
    with user_errors():
        try:
            from hpu_duo.lab.eval.lm_eval_adapter import run_harness
        except ModuleNotFoundError as error:
            raise ValueError(
                f"expected the package lm-eval ({install_command('eval')}), got: {error}"
            ) from None
        # What the harness refuses, an unknown task say, it refuses while running; the model's own work raises
        # no ValueError there.
        rows = run_harness(ctx.args)
    if rows:
        note = "KV: means over the requests of the line, each with its answer, that the model has run."
        show(rows, ("task", "num_requests", *KV_COLUMNS), note)
