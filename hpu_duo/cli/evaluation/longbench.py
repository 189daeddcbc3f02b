"""``hpu-duo eval longbench`` and ``longbench-v2``: questions over long contexts from files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpu_duo.cli.arguments import options as opt
from hpu_duo.cli.arguments.options import grouped
from hpu_duo.cli.evaluation import options as eopt
from hpu_duo.cli.evaluation.report import (
    ChatTemplate,
    Limit,
    SimulatedDecodes,
    ask,
    check_simulated_decodes,
    limited,
    open_results,
    report,
)
from hpu_duo.cli.terminal.errors import user_errors

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
        from hpu_duo.lab.eval import ResultsNotWrittenError
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
        settings = {
            "files": [eopt.digest(path) for path in file],
            "prompts": protocol.templates,
            "max_length": max_length,
            "metrics": metrics,
            "chat_template": chat_template,
            "simulated_decodes": simulated_decodes,
            "limit": limit,
        }
        results = open_results(out, "longbench", {**choice.settings(), **settings})
        subject = choice.load()
        questions = [protocol.question(subject, item, index) for index, item in enumerate(items)]
        subject.check_lengths([len(one.prompt) + one.max_new_tokens for one in questions], "prompts")
    with user_errors(ResultsNotWrittenError):
        records = ask(subject, len(questions), questions.__getitem__, results, simulated_decodes)
        report(means(records, ("dataset", "length_bucket") if by_length else ("dataset",)), out, as_json)


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
        from hpu_duo.lab.eval import ResultsNotWrittenError
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
        settings = {
            "files": [eopt.digest(file)],
            "prompt": template,
            "max_length": max_length,
            "chat_template": chat_template,
            "simulated_decodes": simulated_decodes,
            "limit": limit,
        }
        results = open_results(out, "longbench-v2", {**choice.settings(), **settings})
        subject = choice.load()
        questions = [
            Question(
                tuple(protocol.prompt(subject, item.prompt(template))),
                MAX_NEW_TOKENS,
                item.record,
                item.score,
            )
            for item in items
        ]
        subject.check_lengths([len(one.prompt) + one.max_new_tokens for one in questions], "prompts")
    with user_errors(ResultsNotWrittenError):
        records = ask(subject, len(questions), questions.__getitem__, results, simulated_decodes)
        report(choice_rows(records), out, as_json)
