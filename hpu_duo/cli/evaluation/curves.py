"""``hpu-duo eval curve`` and ``kvpress``: accuracy against KV budget."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.cli import options as opt
from hpu_duo.cli.evaluation import options as eopt
from hpu_duo.cli.evaluation.report import (
    KV_COLUMNS,
    REPORT,
    RESULTS,
    Evaluation,
    Measure,
    Records,
    Report,
    check_outputs,
    finish,
    show,
    warn_of_failures,
    write_text,
)
from hpu_duo.cli.options import grouped, load_model, with_pattern
from hpu_duo.cli.terminal import Waiting, check_matplotlib, user_errors
from hpu_duo.config.overrides import EngineOverrides

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.heads import HeadPattern
    from hpu_duo.lab.eval import ModelUnderTest, PasskeyTask, ResultFile, Subject
    from hpu_duo.lab.eval.kvpress_peer import KVPressProcess
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
    budgets: Annotated[list[float], typer.Option(help="Shares of a text's tokens that policies store.")] = (
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
        Evaluation("policies", self._settings, self._prepare, self._report, (CSV, PNG)).run(self.out, as_json)

    def _prepare(self) -> Measure:
        # What cannot be loaded is refused before anything is measured.
        for point in self.points:
            point.loading(self.pattern, self.task.num_tokens)
        return self._measured

    def _measured(self, results: ResultFile) -> Iterator[dict[str, Any]]:
        from hpu_duo.lab.eval.policy_curve import measured_points

        notes = Console(stderr=True)
        for record in measured_points(self.points, self.task, self._load, results):
            text = f"{record['policy']} {record['budget']:g} {record['task']}: {record['value']:.4g}"
            notes.print(text, highlight=False)
            yield record

    def _report(self, records: Records) -> Report:
        from hpu_duo.cli.evaluation.report import draw_policies
        from hpu_duo.lab.eval.policy_curve import policy_rows

        rows = policy_rows(records)
        write_text(self.out / CSV, _csv(rows))
        draw_policies(rows, self.out / PNG)
        columns = ("task", "policy", "budget", "num_answers", "value", *KV_COLUMNS)
        return Report(rows, columns, {"points": rows})

    def _load(self, point: PolicyPoint) -> Subject:
        from hpu_duo.lab.eval import Subject

        with user_errors():
            arguments = point.loading(self.pattern, self.task.num_tokens)
            engine = with_pattern(self.choice.engine, arguments.pop("pattern", None))
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
        from hpu_duo.cli.evaluation.report import draw_curve
        from hpu_duo.lab.eval import (
            CurveTask,
            PasskeyQuestions,
            PasskeyResult,
            PasskeyTask,
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

    def settings() -> dict[str, Any]:
        own = {name: getattr(task, name) for name in ("num_tokens", "num_documents", "num_passkeys")}
        own |= {"passkey_words": passkey_words, "seed": seed, "rehearsals": rehearsals}
        return {**choice.settings(), **own, **eopt.text_settings(task.text)}

    def load(pattern: HeadPattern) -> Subject:
        with user_errors():
            subject = choice.load_with(pattern)
            # Refuses a task that does not fit the model or its tokenizer before it is begun.
            PasskeyQuestions.write(subject, task)
        return subject

    def measured(results: ResultFile) -> Iterator[dict[str, Any]]:
        notes = Console(stderr=True)
        with Waiting("answering the questions of a point") as wait:
            for number, record in enumerate(curve_points(points, task, load, results), start=1):
                wait.progressed()
                notes.print(
                    f"{number}/{len(points)} {record['label']} {record['retrieval_heads']} heads: "
                    f"{record['num_exact']}/{record['num_answers']}",
                    highlight=False,
                )
                yield record

    def report(records: Records) -> Report:
        full = next(record for record in records if record["label"] == FULL)
        warn_of_failures({num_tokens: PasskeyResult.of_record(full)})
        rows = summary(records)
        write_text(out / CSV, _csv(rows))
        draw_curve(rows, out / PNG)
        columns = ("label", "sweep", "retrieval_heads", "sink", "recent", "num_seeds", "num_questions")
        shares = ("accuracy", "accuracy_min", "accuracy_max", *KV_COLUMNS)
        return Report(rows, (*columns, *shares), {"points": rows})

    Evaluation("curve", settings, lambda: measured, report, (CSV, PNG)).run(out, as_json)


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


TABLE = "table.md"
_ANSWER_TOKENS = 1024
"""More than questions and answers take behind a text."""
_COLUMNS = (
    *("task", "policy", "budget", "system", "value", "kv_ratio", "cpu_s"),
    *("kvpress_value", "kvpress_kv_ratio", "kvpress_cpu_s", "difference"),
)
_NOTE = (
    "In brackets: 95 % intervals. KV ratio: bytes kept at the end of an answer / bytes of full attention. "
    "difference: ours less kvpress's, of perplexity in nats a token; above 0 ours is better."
)


@grouped
def kvpress(
    *,
    out: eopt.Directory,
    kvpress_python: Annotated[
        Path, typer.Option(metavar="PYTHON", help="Program of an environment that has kvpress.")
    ],
    policies: Annotated[list[str], typer.Option(help="Policies to compare, each a --kv-policy.")] = [  # noqa: B006
        "h2o",
        "tova",
        "streaming-llm",
        "snapkv",
        "expected-attention",
    ],
    budgets: Annotated[list[float], typer.Option(help="Shares of a text's tokens that policies store.")] = [  # noqa: B006
        0.05,
        0.1,
        0.2,
        0.5,
    ],
    tasks: Annotated[list[str], typer.Option(help="Tasks: passkey, rehearsed, perplexity, ruler.")] = [  # noqa: B006
        "passkey",
        "rehearsed",
    ],
    prompts: Annotated[
        list[str],
        typer.Option(help="How the engine's heads read a prompt (--kv-prompt): chunks, whole or both."),
    ] = ["chunks"],  # noqa: B006
    num_tokens: Annotated[int, typer.Option(help="Length of a document.")] = 2000,
    num_documents: eopt.NumDocuments = 4,
    num_passkeys: eopt.NumPasskeys = 4,
    passkey_words: eopt.PasskeyWords = 8,
    rehearsals: eopt.NumRehearsals = None,
    ruler: RulerChoice,
    text: eopt.TextOptions,
    model: opt.Model = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
    engine: eopt.Compared,
) -> None:
    """The same model, questions and budgets in kvpress, which runs in its own environment, beside ours."""
    with user_errors():
        from hpu_duo.lab.eval.policy_curve import REHEARSALS, PolicyTask, policy_points

        task = PolicyTask(
            tuple(tasks),
            num_tokens,
            num_documents,
            num_passkeys,
            passkey_words,
            seed,
            eopt.rehearsed(rehearsals) or REHEARSALS,
            text=text.read(model),
            **ruler.fields,
        )
        points = policy_points(["full", *policies], budgets)
        choice = eopt.Choice(model, {**engine, "decode_len": eopt.SCORED_LEN})
        comparison = _Comparison(points, task, tuple(prompts), choice)
        comparison.check()
        check_outputs(out / RESULTS, [out / TABLE, out / REPORT])
    comparison.run(kvpress_python, out, as_json)


@dataclass(frozen=True)
class _Comparison:
    points: list[PolicyPoint]
    task: PolicyTask
    prompts: tuple[str, ...]
    choice: eopt.Choice

    @property
    def directory(self) -> Path:
        """That of the model."""
        return self.choice.model or MODEL_DIR

    def check(self) -> None:
        """Refuse policies and ways to read prompts that there are not.

        Raises:
            ValueError: there is no such one.
        """
        from hpu_duo.lab.eval.kvpress_peer import press_of

        for way in self.prompts:
            if way not in ("chunks", "whole"):
                raise ValueError(f"expected --prompts chunks, whole or both, got {way!r}")
        for policy in dict.fromkeys(point.policy for point in self.points[1:]):
            if press_of(policy) is None:
                typer.echo(f"hpu-duo: note: kvpress has no counterpart of {policy}", err=True)

    def run(self, python: Path, out: Path, as_json: bool) -> None:
        """Ask kvpress, then the engine, what the file of results does not have yet; write the tables."""
        with user_errors():
            from hpu_duo.lab.eval import ResultFile, ResultsNotWrittenError
            from hpu_duo.lab.eval.kvpress_peer import KVPressError, KVPressProcess, beside, comparison_table

            settings = {**self.choice.settings(), **task_settings(self.task)}
            tokenizer = self._tokenizer()
            device, dtype = str(self.choice.engine.get("device")), str(self.choice.engine.get("dtype"))
            with user_errors(KVPressError):
                process = KVPressProcess(python, self.directory, dtype, device)
        records: list[dict[str, Any]] = []
        notes = Console(stderr=True)
        try:
            with user_errors():
                results = ResultFile(out / RESULTS, "kvpress", {**settings, "kvpress": process.versions})
            with user_errors((ResultsNotWrittenError, KVPressError)):
                for record in self._theirs(process, tokenizer, results):
                    _tell(notes, record)
                    records.append(record)
        finally:
            process.close()
        with user_errors(ResultsNotWrittenError):
            for record in self._ours(results):
                _tell(notes, record)
                records.append(record)
            rows = beside(records)
            write_text(out / TABLE, comparison_table(rows))
            if not as_json:
                show(rows, _COLUMNS, _NOTE)
            finish({"kvpress": process.versions, "rows": rows}, out, as_json)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        from hpu_duo.modeling.loading import load_tokenizer

        found = load_tokenizer(self.directory)
        if found is None:
            raise ValueError(f"expected a tokenizer beside the model in {self.directory}, found none")
        return found

    def _theirs(
        self, process: KVPressProcess, tokenizer: PreTrainedTokenizerBase, results: ResultFile
    ) -> Iterator[dict[str, Any]]:
        from hpu_duo.generation import as_eos_ids
        from hpu_duo.lab.eval.kvpress_peer import KVPressModel, press_of
        from hpu_duo.lab.eval.policy_curve import FULL, measured_points
        from hpu_duo.modeling.loading import read_config, read_generation_config

        config = read_config(self.directory)
        eos = as_eos_ids(read_generation_config(self.directory, config).eos_token_id)

        def load(point: PolicyPoint) -> ModelUnderTest:
            press = None if point.policy == FULL else press_of(point.policy)
            kept = point.num_kept(self.task.num_tokens)
            with user_errors():
                model = KVPressModel(process, tokenizer, self._max_len(), eos, press, kept)
                self.task.check(model)
            return model

        points = [one for one in self.points if one.policy == FULL or press_of(one.policy) is not None]
        yield from measured_points(points, self.task, load, results, {"system": "kvpress"})

    def _ours(self, results: ResultFile) -> Iterator[dict[str, Any]]:
        from hpu_duo.lab.eval.policy_curve import measured_points

        full, others = self.points[:1], self.points[1:]
        for way in (None, *self.prompts):
            points = full if way is None else others
            system = "hpu-duo" if way is None else f"hpu-duo, {way}"
            load = partial(self._load, way)
            yield from measured_points(points, self.task, load, results, {"system": system})

    def _load(self, prompts: str | None, point: PolicyPoint) -> ModelUnderTest:
        from hpu_duo.lab.eval import Subject

        engine = self.choice.engine
        if prompts is not None:
            budget = float(point.num_kept(self.task.num_tokens))
            engine = {**engine, "kv_policy": point.policy, "kv_budget": budget, "kv_prompt": prompts}
        if prompts == "whole":
            # A step holds the longest prompt and a token of each other request.
            longest = min(self._max_len(), self.task.num_tokens + _ANSWER_TOKENS)
            width = engine.get("max_num_seqs", eopt.MAX_NUM_SEQS)
            engine = {**engine, "max_model_len": longest, "max_num_batched_tokens": longest + width}
        with user_errors():
            subject = Subject(load_model(self.choice.model, engine, eopt.MAX_NUM_SEQS))
            self.task.check(subject)
            return subject

    def _max_len(self) -> int:
        from hpu_duo.modeling.config_checks import served_len
        from hpu_duo.modeling.loading import read_config

        return served_len(read_config(self.directory).get_text_config(), None)


def _tell(notes: Console, record: dict[str, Any]) -> None:
    point = f"{record['system']}: {record['policy']} {record['budget']:g} {record['task']}"
    notes.print(f"{point}: {record['value']:.4g}, {record['cpu_s']:.1f} CPU s", highlight=False)
