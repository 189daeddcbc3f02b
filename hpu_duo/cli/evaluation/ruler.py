"""``hpu-duo eval ruler``: synthetic long-context tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpu_duo.cli.arguments import options as opt
from hpu_duo.cli.arguments.option_groups import grouped
from hpu_duo.cli.evaluation import options as eopt
from hpu_duo.cli.evaluation.answers import (
    SimulatedDecodes,
    ask,
    check_simulated_decodes,
    open_results,
    report,
)
from hpu_duo.cli.evaluation.report import write_text
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.writable import check_file


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
    simulated_decodes: SimulatedDecodes = 1,
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
        from hpu_duo.eval.answering import Question, means
        from hpu_duo.eval.result_file import refuse_existing

        if num_samples < 1:
            raise ValueError(f"expected --num-samples of at least 1, got {num_samples}")
        check_simulated_decodes(simulated_decodes)
        chosen = list(tasks or RULER_TASKS)
        for task in chosen:
            if task not in RULER_TASKS:
                raise ValueError(f"expected --tasks among {', '.join(RULER_TASKS)}, got {task!r}")
        choice = eopt.Choice(model, heads, engine)
        settings = {"num_tokens": num_tokens, "num_samples": num_samples, "seed": seed, "tasks": chosen}
        settings |= {"simulated_decodes": simulated_decodes}
        if write is not None:
            refuse_existing([write])
            check_file("--write", write, makes_parents=True)
        results = open_results(out, "ruler", {**choice.settings(), **settings})
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
        questions = [
            Question(
                tuple(subject.encode(sample.prompt, is_start=True)),
                sample.max_new_tokens,
                {**sample.as_record(), "num_tokens": length},
                sample.score,
            )
            for length, sample in samples
        ]
        subject.check_lengths([len(one.prompt) + one.max_new_tokens for one in questions], "prompts")
    with user_errors(ResultsNotWrittenError):
        records = ask(subject, len(questions), questions.__getitem__, results, simulated_decodes)
        report(means(records, ("task", "num_tokens")), out, as_json)
