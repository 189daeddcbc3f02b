"""``hpu-duo eval curve``: accuracy against KV budget for several ways to choose heads."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hpu_duo.cli.arguments import options as opt
from hpu_duo.cli.arguments.option_groups import Only, grouped
from hpu_duo.cli.evaluation import options as eopt
from hpu_duo.cli.evaluation.control import warn_of_failures
from hpu_duo.cli.evaluation.policies import PolicyOptions
from hpu_duo.cli.evaluation.report import KV_COLUMNS, REPORT, RESULTS, check_outputs, finish, show, write_text
from hpu_duo.cli.terminal.drawing import check_matplotlib
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.cli.terminal.waiting import Waiting

if TYPE_CHECKING:
    from hpu_duo.eval import Subject
    from hpu_duo.heads import HeadPattern


@grouped
def curve(
    *,
    out: eopt.Directory,
    patterns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=DIR",
            help="Head patterns to compare; one label several times is several seeds.",
            show_default="that of the built-in model",
        ),
    ] = None,
    shares: Annotated[list[float], typer.Option(help="Shares of retrieval heads.")] = [  # noqa: B006
        0.125,
        0.25,
        0.375,
        0.5,
        0.75,
    ],
    random_seeds: Annotated[int, typer.Option(help="Random choices of heads for each share.")] = 3,
    sinks: Annotated[
        list[int] | None, typer.Option(help="Sink sizes to sweep.", show_default="no sweep")
    ] = None,
    recents: Annotated[
        list[int] | None, typer.Option(help="Recent sizes to sweep.", show_default="no sweep")
    ] = None,
    sweep_share: Annotated[float, typer.Option(help="Share of retrieval heads in the sweeps.")] = 0.5,
    compared: PolicyOptions,
    num_tokens: Annotated[int, typer.Option(help="Length of a document.")] = 2000,
    num_documents: eopt.NumDocuments = 8,
    num_passkeys: eopt.NumPasskeys = 8,
    passkey_words: eopt.PasskeyWords = 16,
    rehearsals: eopt.NumRehearsals = None,
    text: eopt.TextOptions,
    model: opt.Model = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
    heads: Annotated[opt.HeadOptions, Only("sink", "recent")],
    engine: eopt.Scoring,
) -> None:
    """Accuracy against KV budget, of choices of heads or, with --policies, of what the cache keeps."""
    with user_errors():
        check_matplotlib("the picture of the curve")
        from hpu_duo.cli.evaluation.plot import draw_curve
        from hpu_duo.eval import (
            CurveTask,
            PasskeyQuestions,
            PasskeyResult,
            PasskeyTask,
            ResultFile,
            ResultsNotWrittenError,
            curve_points,
        )
        from hpu_duo.eval.curve import FULL, summary

        named: list[tuple[str, Path | None]] = [_named(one) for one in patterns or []]
        if not named and model is not None:
            raise ValueError("expected --patterns LABEL=DIR for a model that has none of its own, got none")
        read = tuple((label, eopt.read_pattern(path, heads)) for label, path in named or [("built-in", None)])
        if engine.kv_policy is not None:
            raise ValueError(f"expected --policies {engine.kv_policy} for curves, got --kv-policy")
        choice = eopt.Choice(model, heads, engine)
        choice.check_patterns(pattern for _, pattern in read)
        task = PasskeyTask(
            num_tokens,
            num_documents,
            num_passkeys,
            passkey_words,
            seed,
            text=text.read(model),
            rehearsals=eopt.rehearsed(rehearsals),
        )
    if compared.policies is not None:
        compared.measure(task, read[0][1], choice, out, as_json)
        return
    with user_errors():
        points = CurveTask(
            read, tuple(shares), random_seeds, tuple(sinks or ()), tuple(recents or ()), sweep_share
        ).points()
        settings = {name: getattr(task, name) for name in ("num_tokens", "num_documents", "num_passkeys")}
        settings |= {"passkey_words": passkey_words, "seed": seed, "rehearsals": rehearsals}
        settings |= eopt.text_settings(task.text)
        check_outputs(out / RESULTS, [out / "curve.csv", out / "curve.png", out / REPORT])
        results = ResultFile(out / RESULTS, "curve", {**choice.settings(), **settings})

    def load(pattern: HeadPattern) -> Subject:
        with user_errors():
            subject = choice.load_with(pattern)
            # Refuses a task that does not fit the model or its tokenizer before it is begun.
            PasskeyQuestions.write(subject, task)
        return subject

    records = []
    notes = Console(stderr=True)
    with user_errors(ResultsNotWrittenError):
        with Waiting("answering the questions of a point") as wait:
            for record in curve_points(points, task, load, results):
                wait.progressed()
                records.append(record)
                notes.print(
                    f"{len(records)}/{len(points)} {record['label']} {record['retrieval_heads']} heads: "
                    f"{record['num_exact']}/{record['num_answers']}",
                    highlight=False,
                )
        full = next(record for record in records if record["label"] == FULL)
        warn_of_failures({num_tokens: PasskeyResult.of_record(full)})
        rows = summary(records)
        write_text(out / "curve.csv", _csv(rows))
        draw_curve(rows, out / "curve.png")
        if not as_json:
            columns = ("label", "sweep", "retrieval_heads", "sink", "recent", "num_seeds", "num_questions")
            show(rows, (*columns, "accuracy", "accuracy_min", "accuracy_max", *KV_COLUMNS))
        finish({"points": rows}, out, as_json)


def _named(text: str) -> tuple[str, Path | None]:
    label, is_named, path = text.partition("=")
    if not is_named or not label or not path:
        raise ValueError(f"expected --patterns LABEL=DIR, got {text!r}")
    return label, Path(path)


def _csv(rows: list[dict[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
