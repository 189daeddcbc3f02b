"""``hpu-duo eval curve``: accuracy against KV budget for several ways to choose heads."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from hpu_duo.cli.arguments import options as opt
from hpu_duo.cli.arguments.loading import load_model, with_pattern
from hpu_duo.cli.arguments.options import grouped
from hpu_duo.cli.evaluation import options as eopt
from hpu_duo.cli.evaluation.report import (
    KV_COLUMNS,
    REPORT,
    RESULTS,
    check_outputs,
    finish,
    show,
    warn_of_failures,
    write_text,
)
from hpu_duo.cli.terminal.drawing import check_matplotlib
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.cli.terminal.waiting import Waiting
from hpu_duo.config.overrides import EngineOverrides

if TYPE_CHECKING:
    from hpu_duo.heads import HeadPattern
    from hpu_duo.lab.eval import PasskeyTask, Subject
    from hpu_duo.lab.eval.policy_curve import PolicyPoint, PolicyTask

CSV, PNG = "curve.csv", "curve.png"


@dataclass(frozen=True)
class RulerChoice:
    """Tasks and samples of RULER, where they are one measurement among others."""

    ruler_tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="RULER's tasks in the task ruler, by its names.", show_default="the 11 that need no file"
        ),
    ] = None
    ruler_limit: Annotated[int, typer.Option(help="Samples of each of RULER's tasks.")] = 10

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of ``PolicyTask``."""
        named = {} if self.ruler_tasks is None else {"ruler_tasks": tuple(self.ruler_tasks)}
        return {"num_samples": self.ruler_limit, **named}


@dataclass(frozen=True)
class PolicyOptions(RulerChoice):
    """Policies of the KV cache to compare instead of choices of heads."""

    policies: Annotated[
        list[str] | None,
        typer.Option(
            help="Policies to compare instead of choices of heads: full, duo, streaming, or a --kv-policy.",
            show_default="none",
        ),
    ] = None
    budgets: Annotated[list[float], typer.Option(help="Shares of a text's tokens that policies keep.")] = (
        0.05,
        0.1,
        0.2,
        0.5,
    )  # type: ignore[assignment]
    policy_tasks: Annotated[
        list[str],
        typer.Option(help="What policies are measured on: passkey, rehearsed, perplexity, ruler."),
    ] = ("passkey", "rehearsed", "perplexity")  # type: ignore[assignment]

    def measure(
        self, passkeys: PasskeyTask, pattern: HeadPattern, choice: eopt.Choice, out: Path, as_json: bool
    ) -> None:
        """Measure the policies with the sizes of a task of passkeys.

        Args:
            pattern: scores of heads for DuoAttention.
            out: directory of the results.
        """
        with user_errors():
            from hpu_duo.lab.eval.policy_curve import REHEARSALS, PolicyTask, policy_points

            points = policy_points(self.policies or (), self.budgets)
            task = PolicyTask(
                tuple(self.policy_tasks),
                passkeys.num_tokens,
                passkeys.num_documents,
                passkeys.num_passkeys,
                passkeys.passkey_words,
                passkeys.seed,
                passkeys.rehearsals or REHEARSALS,
                text=passkeys.text,
                **self.fields,
            )
        PolicyCurve(points, task, pattern, choice, out).run(as_json)


@dataclass(frozen=True)
class PolicyCurve:
    """A measurement of policies, as asked for.

    Attributes:
        points, task: what to measure.
        pattern: scores of heads for DuoAttention.
        choice: the model and its engine.
        out: directory of the results.
    """

    points: list[PolicyPoint]
    task: PolicyTask
    pattern: HeadPattern
    choice: eopt.Choice
    out: Path

    def run(self, as_json: bool) -> None:
        """Measure what is not there yet, then write the table and the picture."""
        from hpu_duo.cli.evaluation.plot import draw_policies
        from hpu_duo.lab.eval import ResultFile, ResultsNotWrittenError
        from hpu_duo.lab.eval.policy_curve import measured_points, policy_rows

        with user_errors():
            # What cannot be loaded is refused before anything is measured.
            for point in self.points:
                point.loading(self.pattern, self.task.num_tokens)
            check_outputs(self.out / RESULTS, [self.out / CSV, self.out / PNG, self.out / REPORT])
            results = ResultFile(self.out / RESULTS, "policies", self._settings())
        notes, records = Console(stderr=True), []
        with user_errors(ResultsNotWrittenError):
            for record in measured_points(self.points, self.task, self._load, results):
                records.append(record)
                notes.print(
                    f"{record['policy']} {record['budget']:g} {record['task']}: {record['value']:.4g}",
                    highlight=False,
                )
            rows = policy_rows(records)
            write_text(self.out / CSV, _policies_csv(rows))
            draw_policies(rows, self.out / PNG)
            if not as_json:
                show(rows, ("task", "policy", "budget", "num_answers", "value", *KV_COLUMNS))
            finish({"points": rows}, self.out, as_json)

    def _load(self, point: PolicyPoint) -> Subject:
        from hpu_duo.lab.eval import Subject

        with user_errors():
            arguments = point.loading(self.pattern, self.task.num_tokens)
            engine = with_pattern(self.choice.engine, arguments.pop("pattern", None))
            if arguments:
                # Heads with a budget decode one token at a time.
                arguments["decode_len"] = 1
            engine = cast(EngineOverrides, {**engine, **arguments})
            subject = Subject(load_model(self.choice.model, engine, eopt.MAX_NUM_SEQS))
            self.task.check(subject)
            return subject

    def _settings(self) -> dict[str, Any]:
        pattern = [self.pattern.sink, self.pattern.recent, *self.pattern.scores.ravel().tolist()]
        return {**self.choice.settings(), **task_settings(self.task), "duo": pattern}


def task_settings(task: PolicyTask) -> dict[str, Any]:
    """Return the settings of a task that the results depend on."""
    names = ("num_tokens", "num_documents", "num_passkeys", "passkey_words", "seed")
    own = {name: getattr(task, name) for name in (*names, "num_samples", "ruler_tasks")}
    rehearsals = [task.rehearsals.num_rehearsals, task.rehearsals.tail]
    return {**own, **eopt.text_settings(task.text), "rehearsals": rehearsals}


def _policies_csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


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
    engine: eopt.WithoutHeads,
) -> None:
    """Accuracy against KV budget, of choices of heads or, with --policies, of what the cache keeps."""
    with user_errors():
        check_matplotlib("the picture of the curve")
        from hpu_duo.cli.evaluation.plot import draw_curve
        from hpu_duo.lab.eval import (
            CurveTask,
            PasskeyQuestions,
            PasskeyResult,
            PasskeyTask,
            ResultFile,
            ResultsNotWrittenError,
            curve_points,
        )
        from hpu_duo.lab.eval.curve import FULL, summary

        named: list[tuple[str, Path | None]] = [_named(one) for one in patterns or []]
        if not named and model is not None:
            raise ValueError("expected --patterns LABEL=DIR for a model that has none of its own, got none")
        read = tuple(
            (label, eopt.read_pattern(path, engine)) for label, path in named or [("built-in", None)]
        )
        if engine.get("kv_policy") is not None:
            raise ValueError(f"expected --policies {engine['kv_policy']} for curves, got --kv-policy")
        choice = eopt.Choice(model, engine)
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
