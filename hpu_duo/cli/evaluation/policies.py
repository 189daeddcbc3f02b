"""``hpu-duo eval curve --policies``: accuracy against bytes held for policies of the KV cache."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hpu_duo.cli.arguments import options as opt
from hpu_duo.cli.arguments.loading import load_model
from hpu_duo.cli.evaluation import options as eopt
from hpu_duo.cli.evaluation.report import KV_COLUMNS, REPORT, RESULTS, check_outputs, finish, show, write_text
from hpu_duo.cli.terminal.errors import user_errors

if TYPE_CHECKING:
    from hpu_duo.eval import PasskeyTask, Subject
    from hpu_duo.eval.policy_curve import PolicyPoint, PolicyTask
    from hpu_duo.heads import HeadPattern

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
            from hpu_duo.eval.policy_curve import REHEARSALS, PolicyTask, policy_points

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
        from hpu_duo.cli.evaluation.policy_plot import draw_policies
        from hpu_duo.eval import ResultFile, ResultsNotWrittenError
        from hpu_duo.eval.policy_curve import measured_points, policy_rows

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
            write_text(self.out / CSV, _csv(rows))
            draw_policies(rows, self.out / PNG)
            if not as_json:
                show(rows, ("task", "policy", "budget", "num_answers", "value", *KV_COLUMNS))
            finish({"points": rows}, self.out, as_json)

    def _load(self, point: PolicyPoint) -> Subject:
        from hpu_duo.eval import Subject

        with user_errors():
            arguments = point.loading(self.pattern, self.task.num_tokens)
            heads = arguments.pop("pattern", None) or opt.HeadOptions()
            if arguments:
                # Heads with a budget decode one token at a time.
                arguments["decode_len"] = 1
            engine = replace(self.choice.engine, **arguments)
            subject = Subject(load_model(self.choice.model, heads, engine, eopt.MAX_NUM_SEQS))
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


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
