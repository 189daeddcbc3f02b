"""``hpu-duo eval ruler``, ``longbench`` and ``longbench-v2``: questions over long contexts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpu_duo.cli import options as opt
from hpu_duo.cli.evaluation import options as eopt
from hpu_duo.cli.evaluation.report import (
    KV_COLUMNS,
    ChatTemplate,
    Evaluation,
    Limit,
    Measure,
    Report,
    SimulatedDecodes,
    check_simulated_decodes,
    limited,
    write_text,
)
from hpu_duo.cli.options import grouped
from hpu_duo.cli.terminal import user_errors
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.lab.eval import RulerTask, Subject
    from hpu_duo.lab.eval.answering import Question
    from hpu_duo.lab.eval.ruler_questions import DocumentQuestions, RulerTexts


@dataclass(frozen=True)
class RulerFiles:
    """Files of the user that RULER's tasks are written with."""

    ruler: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A copy of NVIDIA/RULER, for its sentences, words and essays.",
            show_default="texts of our own, whose scores compare with no others",
        ),
    ] = None
    haystack: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 text around needles.",
            show_default="RULER's essays, or sentences of the built-in language",
        ),
    ] = None
    squad: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="SQuAD 2.0's dev-v2.0.json, for qa_1.",
            show_default="json/squad.json in --ruler",
        ),
    ] = None
    hotpotqa: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="HotpotQA's hotpot_dev_distractor_v1.json, for qa_2.",
            show_default="json/hotpotqa.json in --ruler",
        ),
    ] = None

    def read(self) -> tuple[RulerTexts, dict[str, DocumentQuestions]]:
        """Texts, and questions by the task that asks them.

        Raises:
            ValueError: a file cannot be read, or holds something else.
        """
        from hpu_duo.lab.eval.ruler_checkout import find_questions, read_checkout
        from hpu_duo.lab.eval.ruler_questions import OWN_TEXTS
        from hpu_duo.lab.tasks.haystack import TextHaystack

        texts = OWN_TEXTS if self.ruler is None else read_checkout(self.ruler)
        if self.haystack is not None:
            texts = texts.with_haystack(TextHaystack.read(self.haystack))
        return texts, find_questions(self.ruler, self.squad, self.hotpotqa)


@grouped
def ruler(
    *,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Tasks by RULER's names.", show_default="all 13, or 11 without files for qa_1 and qa_2"
        ),
    ] = None,
    num_tokens: Annotated[list[int], typer.Option(help="Lengths, answers included.")] = [2000],  # noqa: B006
    limit: Annotated[int, typer.Option(help="Samples of each task and length.")] = 500,
    files: RulerFiles,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the samples in RULER's format and run nothing."),
    ] = None,
    chat_template: ChatTemplate = False,
    simulated_decodes: SimulatedDecodes = 1,
    out: eopt.Out = None,
    model: opt.Model = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
    engine: eopt.Engine,
) -> None:
    """RULER's synthetic tasks, written for the model's tokenizer, with their average."""
    with user_errors():
        from hpu_duo.lab.eval import RULER_TASKS
        from hpu_duo.lab.eval.result_file import refuse_existing
        from hpu_duo.lab.eval.ruler import QUESTION_TASKS, ruler_rows

        if limit < 1:
            raise ValueError(f"expected --limit of at least 1, got {limit}")
        check_simulated_decodes(simulated_decodes)
        texts, questions = files.read()
        chosen = list(tasks or (one for one in RULER_TASKS if one not in QUESTION_TASKS or one in questions))
        for task in chosen:
            if task not in RULER_TASKS:
                raise ValueError(f"expected --tasks among {', '.join(RULER_TASKS)}, got {task!r}")
        if write is not None:
            refuse_existing([write])
            check_file("--write", write, makes_parents=True)
        choice = eopt.Choice(model, engine)

    def written(subject: Subject) -> list[RulerTask]:
        if write is None:
            subject.check_lengths(num_tokens, "samples", "--num-tokens")
        around = num_around(subject, chat_template)
        found = [
            _task(name, subject, length, texts, questions, seed, around)
            for length in num_tokens
            for name in chosen
        ]
        # What cannot be written is refused before anything runs.
        for one in found:
            one.sample(0)
            one.sample(limit - 1)
        return found

    if write is not None:
        with user_errors():
            samples = written(choice.load())
        _write_samples(samples, limit, write)
        return

    def prepare() -> Measure:
        subject = choice.load()
        samples = written(subject)
        return _asking(
            subject,
            len(samples) * limit,
            lambda at: _question(subject, samples[at // limit], at % limit, chat_template),
            simulated_decodes,
        )

    def settings() -> dict[str, Any]:
        return {
            **choice.settings(),
            "num_tokens": num_tokens,
            "limit": limit,
            "seed": seed,
            "tasks": chosen,
            "texts": texts.fingerprint,
            "questions": {task: found.fingerprint for task, found in questions.items() if task in chosen},
            "chat_template": chat_template,
            "simulated_decodes": simulated_decodes,
        }

    Evaluation("ruler", settings, prepare, lambda found: _scores(ruler_rows(found))).run(out, as_json)


_GROUPS = ("task", "dataset", "group", "length_bucket", "num_tokens")


def _scores(rows: Sequence[Mapping[str, Any]]) -> Report:
    """One row for each group of questions."""
    names = [name for name in _GROUPS if name in rows[0]]
    return Report(rows, (*names, "num_samples", "score", *KV_COLUMNS), {"tasks": list(rows)})


def _asking(
    subject: Subject, num_questions: int, question: Callable[[int], Question], num_decoded: int
) -> Measure:
    from hpu_duo.lab.eval.answering import answered

    return lambda results: answered(subject, num_questions, question, results, num_decoded)


def _write_samples(tasks: list[RulerTask], limit: int, file: Path) -> None:
    from hpu_duo.lab.eval import ResultsNotWrittenError

    with user_errors(ResultsNotWrittenError):
        lines = (json.dumps(one.sample(index).as_record()) for one in tasks for index in range(limit))
        write_text(file, "".join(line + "\n" for line in lines))
    typer.echo(f"{len(tasks) * limit} samples in {file}", err=True)


def num_around(subject: Subject, is_chat: bool) -> int:
    """Tokens that a chat template, or the tokenizer itself, puts around a prompt."""
    ids = subject.encode_chat("x") if is_chat else subject.encode("x", is_start=True)
    return len(ids) - subject.count("x")


def _task(
    name: str,
    subject: Subject,
    num_tokens: int,
    texts: RulerTexts,
    questions: dict[str, DocumentQuestions],
    seed: int,
    around: int,
) -> RulerTask:
    from hpu_duo.lab.eval import RulerTask

    return RulerTask(name, subject.count, num_tokens, texts, questions, seed, around)


def _question(subject: Subject, task: RulerTask, index: int, is_chat: bool) -> Any:
    from hpu_duo.lab.eval.answering import Question

    sample = task.sample(index)
    ids = (
        subject.encode_chat(sample.input, sample.answer_prefix)
        if is_chat
        else subject.encode(sample.prompt, is_start=True)
    )
    record = {**sample.as_record(), "num_tokens": task.num_tokens}
    return Question(tuple(ids), sample.max_new_tokens, record, sample.score)


_MaxLength = Annotated[
    int | None,
    typer.Option(help="Cut the middle out of longer prompts.", show_default="longer ones are refused"),
]


@grouped
def longbench(
    *,
    file: Annotated[list[Path], typer.Option(help="JSON lines in LongBench's format; repeatable.")],
    dataset: Annotated[
        str | None, typer.Option(help="Data set of lines that name none.", show_default="the file's name")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts such as LongBench's dataset2prompt.json.", show_default="our own"),
    ] = None,
    metrics: Annotated[
        str,
        typer.Option(
            help="ours, as textbooks have them, or official, as LongBench's scripts score, cut and end."
        ),
    ] = "ours",
    by_length: Annotated[
        bool, typer.Option("--by-length", help="One line for each of LongBench-E's ranges of lengths.")
    ] = False,
    max_length: _MaxLength = None,
    chat_template: ChatTemplate = False,
    simulated_decodes: SimulatedDecodes = 1,
    limit: Limit = None,
    out: eopt.Out = None,
    model: opt.Model = None,
    as_json: opt.Json = False,
    engine: eopt.Engine,
) -> None:
    """Questions over long contexts from LongBench files, each with the metric of its data set."""
    with user_errors():
        from hpu_duo.lab.eval.answering import means
        from hpu_duo.lab.eval.longbench import LongBenchProtocol, MetricSource, read_longbench, read_prompts

        sources = [source.value for source in MetricSource]
        if metrics not in sources:
            raise ValueError(f"expected --metrics {' or '.join(sources)}, got {metrics!r}")
        check_simulated_decodes(simulated_decodes)
        protocol = LongBenchProtocol(
            MetricSource(metrics),
            None if prompts is None else read_prompts(prompts),
            max_length,
            chat_template,
        )
        items = [
            item
            for path in file
            for item in limited(read_longbench(path, dataset or path.stem, protocol.source), limit)
        ]
        choice = eopt.Choice(model, engine)

    def settings() -> dict[str, Any]:
        return {
            **choice.settings(),
            "files": [eopt.digest(path) for path in file],
            "prompts": protocol.templates,
            "max_length": max_length,
            "metrics": metrics,
            "chat_template": chat_template,
            "simulated_decodes": simulated_decodes,
            "limit": limit,
        }

    def prepare() -> Measure:
        subject = choice.load()
        return _asking_all(
            subject,
            [protocol.question(subject, item, index) for index, item in enumerate(items)],
            simulated_decodes,
        )

    groups = ("dataset", "length_bucket") if by_length else ("dataset",)
    Evaluation("longbench", settings, prepare, lambda found: _scores(means(found, groups))).run(out, as_json)


def _asking_all(subject: Subject, questions: list[Question], num_decoded: int) -> Measure:
    """Measure of questions that are written; ValueError for one that the model cannot hold."""
    subject.check_lengths([len(one.prompt) + one.max_new_tokens for one in questions], "prompts")
    return _asking(subject, len(questions), questions.__getitem__, num_decoded)


@grouped
def longbench_v2(
    *,
    file: Annotated[Path, typer.Option(help="Questions of LongBench v2, as a JSON array or JSON lines.")],
    prompt: Annotated[
        Path | None, typer.Option(help="Prompt such as LongBench v2's 0shot.txt.", show_default="our own")
    ] = None,
    max_length: _MaxLength = None,
    chat_template: ChatTemplate = False,
    simulated_decodes: SimulatedDecodes = 1,
    limit: Limit = None,
    out: eopt.Out = None,
    model: opt.Model = None,
    as_json: opt.Json = False,
    engine: eopt.Engine,
) -> None:
    """Questions with four choices over long contexts, as LongBench v2 asks and judges them."""
    with user_errors():
        from hpu_duo.lab.eval.answering import Question
        from hpu_duo.lab.eval.longbench import LongBenchProtocol, MetricSource
        from hpu_duo.lab.eval.longbench_v2 import (
            MAX_NEW_TOKENS,
            PROMPT,
            choice_rows,
            read_longbench_v2,
            read_prompt,
        )

        check_simulated_decodes(simulated_decodes)
        protocol = LongBenchProtocol(MetricSource.OFFICIAL, None, max_length, chat_template)
        template = PROMPT if prompt is None else read_prompt(prompt)
        items = limited(read_longbench_v2(file), limit)
        choice = eopt.Choice(model, engine)

    def settings() -> dict[str, Any]:
        return {
            **choice.settings(),
            "files": [eopt.digest(file)],
            "prompt": template,
            "max_length": max_length,
            "chat_template": chat_template,
            "simulated_decodes": simulated_decodes,
            "limit": limit,
        }

    def prepare() -> Measure:
        subject = choice.load()
        prompts = [tuple(protocol.prompt(subject, item.prompt(template))) for item in items]
        return _asking_all(
            subject,
            [
                Question(ids, MAX_NEW_TOKENS, item.record, item.score)
                for ids, item in zip(prompts, items, strict=True)
            ],
            simulated_decodes,
        )

    Evaluation("longbench-v2", settings, prepare, lambda found: _scores(choice_rows(found))).run(out, as_json)
