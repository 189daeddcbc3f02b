"""``hpu-duo eval ruler`` and ``longbench``: many prompts with answers to compare."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpu_duo.cli.arguments import options as opt
from hpu_duo.cli.arguments.option_groups import grouped
from hpu_duo.cli.evaluation import options as eopt
from hpu_duo.cli.evaluation.report import KV_COLUMNS, REPORT, RESULTS, check_outputs, finish, show, write_text
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.eval import ResultFile, Subject


@grouped
def ruler(
    *,
    tasks: Annotated[
        list[str] | None, typer.Option(help="Tasks by RULER's names.", show_default="all of them")
    ] = None,
    num_tokens: Annotated[list[int], typer.Option(help="Lengths, answers included.")] = [2000],  # noqa: B006
    num_samples: Annotated[int, typer.Option(help="Samples of each task and length.")] = 10,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the samples in RULER's format and run nothing."),
    ] = None,
    out: eopt.Out = None,
    model: opt.Model = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
    heads: opt.HeadOptions,
    engine: eopt.Engine,
) -> None:
    """Synthetic tasks in the manner of RULER, written for the model's tokenizer."""
    with user_errors():
        from hpu_duo.eval import RULER_TASKS, ResultsNotWrittenError, ruler_sample
        from hpu_duo.eval.result_file import refuse_existing

        if num_samples < 1:
            raise ValueError(f"expected --num-samples of at least 1, got {num_samples}")
        chosen = list(tasks or RULER_TASKS)
        for task in chosen:
            if task not in RULER_TASKS:
                raise ValueError(f"expected --tasks among {', '.join(RULER_TASKS)}, got {task!r}")
        choice = eopt.Choice(model, heads, engine)
        settings = {"num_tokens": num_tokens, "num_samples": num_samples, "seed": seed, "tasks": chosen}
        if write is not None:
            refuse_existing([write])
            check_file("--write", write, makes_parents=True)
        results = _open(out, "ruler", {**choice.settings(), **settings})
        subject = choice.load()
        if write is None:
            subject.check_lengths(num_tokens, "samples")
        samples = [
            (length, ruler_sample(task, subject.count, length, index, seed))
            for length in num_tokens
            for task in chosen
            for index in range(num_samples)
        ]
    if write is not None:
        with user_errors(ResultsNotWrittenError):
            write_text(write, "".join(json.dumps(sample.as_record()) + "\n" for _, sample in samples))
        typer.echo(f"{len(samples)} samples in {write}", err=True)
        return
    with user_errors():
        prompts = [subject.encode(sample.prompt, is_start=True) for _, sample in samples]
        most = [sample.max_new_tokens for _, sample in samples]
        _check(subject, prompts, most)
    with user_errors(ResultsNotWrittenError):
        records = _answer(
            subject,
            prompts,
            most,
            [{**sample.as_record(), "num_tokens": length} for length, sample in samples],
            lambda at, pred: samples[at][1].score(pred),
            results,
        )
        _report(_means(records, ("task", "num_tokens")), out, as_json)


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
    max_length: Annotated[
        int | None,
        typer.Option(help="Cut the middle out of longer prompts.", show_default="longer ones are refused"),
    ] = None,
    out: eopt.Out = None,
    model: opt.Model = None,
    as_json: opt.Json = False,
    heads: opt.HeadOptions,
    engine: eopt.Engine,
) -> None:
    """Questions over long contexts from LongBench files, each with the metric of its data set."""
    with user_errors():
        from hpu_duo.eval import ResultsNotWrittenError
        from hpu_duo.eval.longbench import cut_middle, prompt_text, read_longbench, read_prompts

        items = [item for path in file for item in read_longbench(path, dataset or path.stem)]
        templates = None if prompts is None else read_prompts(prompts)
        texts = [prompt_text(item, templates) for item in items]
        choice = eopt.Choice(model, heads, engine)
        settings = {
            "files": [eopt.digest(path) for path in file],
            "prompts": templates,
            "max_length": max_length,
        }
        results = _open(out, "longbench", {**choice.settings(), **settings})
        subject = choice.load()
        ids = [subject.encode(text, is_start=True) for text in texts]
        if max_length is not None:
            ids = [cut_middle(one, max_length) for one in ids]
        most = [item.kind.max_new_tokens for item in items]
        _check(subject, ids, most)
    with user_errors(ResultsNotWrittenError):
        records = _answer(
            subject,
            ids,
            most,
            [
                {
                    "index": at,
                    "dataset": item.dataset,
                    "answers": list(item.answers),
                    "all_classes": list(item.classes),
                    "length": item.length,
                }
                for at, item in enumerate(items)
            ],
            lambda at, pred: items[at].score(pred),
            results,
        )
        _report(_means(records, ("dataset",)), out, as_json)


def _open(out: Path | None, kind: str, settings: dict[str, Any]) -> ResultFile | None:
    from hpu_duo.eval import ResultFile

    if out is None:
        return None
    check_outputs(out / RESULTS, [out / REPORT])
    return ResultFile(out / RESULTS, kind, settings)


def _check(subject: Subject, prompts: Sequence[list[int]], max_new_tokens: Sequence[int]) -> None:
    lengths = [len(prompt) + most for prompt, most in zip(prompts, max_new_tokens, strict=True)]
    subject.check_lengths(lengths, "prompts")


def _answer(
    subject: Subject,
    prompts: Sequence[list[int]],
    max_new_tokens: Sequence[int],
    records: Sequence[dict[str, Any]],
    score: Callable[[int, str], float],
    results: ResultFile | None,
) -> list[dict[str, Any]]:
    """Answer and score prompt by prompt, in batches as large as the engine runs at once."""
    done = [] if results is None else list(results.records)
    width = subject.model.engine_config.scheduler.max_num_seqs
    for first in range(len(done), len(prompts), width):
        batch = range(first, min(first + width, len(prompts)))
        answers, kv = subject.answer([prompts[at] for at in batch], [max_new_tokens[at] for at in batch])
        for at, pred, kept in zip(batch, answers, kv, strict=True):
            record = {**records[at], "pred": pred, "score": score(at, pred), **kept.record_fields}
            done.append(record)
            if results is not None:
                results.append(record)
    return done


def _means(records: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    from hpu_duo.eval import KVBytes
    from hpu_duo.eval.interval import interval_fields

    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    return [
        {
            **dict(zip(names, key, strict=True)),
            "num_samples": len(group),
            **interval_fields("score", fmean(record["score"] for record in group), len(group)),
            **KVBytes.total(map(KVBytes.of_record, group)).report_fields,
        }
        for key, group in groups.items()
    ]


def _report(rows: list[dict[str, Any]], out: Path | None, as_json: bool) -> None:
    if not as_json:
        names = [name for name in ("task", "dataset", "num_tokens") if name in rows[0]]
        show(rows, (*names, "num_samples", "score", *KV_COLUMNS))
    finish({"tasks": rows}, out, as_json)
