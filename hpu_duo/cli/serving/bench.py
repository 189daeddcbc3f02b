"""``hpu-duo bench serve``: open-loop load against any server that speaks OpenAI's HTTP interface."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hpu_duo.cli.arguments.many_values import ManyValues
from hpu_duo.cli.arguments.option_groups import grouped
from hpu_duo.cli.arguments.options import Json, Seed
from hpu_duo.cli.serving.load_options import (
    PaceOptions,
    TargetOptions,
    WorkOptions,
    extra_fields,
    named_values,
)
from hpu_duo.cli.serving.load_views import LoadProgress, notes, print_summary
from hpu_duo.cli.terminal.errors import INTERRUPTED, user_errors
from hpu_duo.extras import install_command
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.load.texts import Texts

NOTHING_COMPLETED = 1

bench_app = typer.Typer(help="Measure servers, and steps of an engine.", no_args_is_help=True)


@bench_app.callback()
def _root() -> None:
    """Measure servers, and steps of an engine."""


@bench_app.command(cls=ManyValues)
@grouped
def serve(
    *,
    target: TargetOptions,
    work: WorkOptions,
    pace: PaceOptions,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for outputs of full length, as vLLM understands it.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Temperature of every request.")] = 0.0,
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="Further fields of every request.", show_default="none")
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help="Goals in milliseconds, such as ttft:500 tpot:50 e2el:10000.",
            show_default="none",
        ),
    ] = None,
    percentiles: Annotated[
        list[float] | None, typer.Option(help="Percentiles of every metric.", show_default="99")
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Kept in the result; repeatable.", show_default="none"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the result as JSON.", show_default="not written"),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="With every request and its text in the result.")
    ] = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Send requests at their times, and report throughput, latencies and failures.

    The loop is open: a request leaves when its time comes, however long others take. Metrics are those of
    vLLM's bench serve, by its definitions and under its names.
    """
    with user_errors():
        if find_spec("aiohttp") is None:
            raise ValueError(f"bench needs aiohttp, which is not installed: {install_command('bench')}")
        from hpu_duo.load import Endpoint, Goals, Pace, Summary, result_fields
        from hpu_duo.load.client import Client, ServerError
        from hpu_duo.load.measure import Measurement

        goals, chosen = Goals.parse(goodput or []), tuple(percentiles or (99.0,))
        if any(not 0 <= one <= 100 for one in chosen):
            raise ValueError(f"expected --percentiles from 0 to 100, got {list(chosen)}")
        if out is not None:
            check_file("--out", out)
        kept = named_values("--metadata", metadata)
        texts = _texts(work.tokenizer)
        measurement = Measurement(
            endpoint=Endpoint.parse(target.endpoint),
            arrivals=work.arrivals(pace, texts, seed),
            prompt_ids=work.prompt_ids(texts, seed),
            model=target.model,
            decode=None if texts is None else texts.of,
            extra=extra_fields(extra_body, temperature, ignore_eos),
            pace=Pace(pace.max_concurrency),
            num_warmups=pace.num_warmups,
            wait_s=target.ready_timeout,
        )
        client = Client(
            target.base_url,
            headers=target.headers(),
            timeout_s=target.request_timeout,
            verify_tls=not target.insecure,
        )
    console = Console(stderr=True)
    with user_errors((ValueError, ServerError)), LoadProgress(console, len(measurement.arrivals)) as progress:
        began = datetime.now(timezone.utc)
        model, run = asyncio.run(measurement.run(client, progress.ended))
    summary = Summary.of(run.outcomes, run.duration_s, goals, chosen)
    settings = {
        "date": began.isoformat(timespec="seconds"),
        "model_id": model,
        **work.settings(pace),
        **target.settings(),
        "num_prompts": len(measurement.arrivals),
        "seed": seed,
        "extra_body": measurement.extra,
        "goodput_goals": asdict(goals),
        "client_cpu_share": run.cpu_share,
        "interrupted": run.is_interrupted,
        "metadata": kept,
    }
    fields = result_fields(summary, settings, run.outcomes if details else None)
    if out is not None:
        out.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(fields, indent=2))
    else:
        print_summary(Console(), summary)
    is_open = pace.max_concurrency is None and measurement.arrivals[-1].time_s > 0
    for note in notes(run, summary, is_open=is_open):
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    if run.is_interrupted:
        raise typer.Exit(INTERRUPTED)
    if not summary.num_completed:
        raise typer.Exit(NOTHING_COMPLETED)


def _texts(path: Path | None) -> Texts | None:
    from hpu_duo.load.texts import Texts

    return None if path is None else Texts(path)
