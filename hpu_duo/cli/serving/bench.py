"""``hpu-duo bench serve``: open-loop load against any server that speaks OpenAI's HTTP interface."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hpu_duo.cli.options import Json, ManyValues, Seed, grouped, option_in
from hpu_duo.cli.terminal import INTERRUPTED, user_errors
from hpu_duo.extras import install_command
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.lab.load import LoadRun, Outcome, Summary
    from hpu_duo.lab.load.texts import Texts
    from hpu_duo.lab.traces import Arrival, PromptIds, Rate


_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
}
_BUSY_SHARE = 0.8
_LATE_MS = 50.0
_MOST_ERRORS = 5


class LoadProgress(AbstractContextManager["LoadProgress"]):
    """A bar of requests that have ended; drawn where the console is a terminal."""

    def __init__(self, console: Console, total: int) -> None:
        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            # Drawing takes time from the client it shows.
            refresh_per_second=2,
        )
        self._task = self._bar.add_task("requests", total=total, failed="")
        self._num_failed = 0

    def __enter__(self) -> LoadProgress:
        """Draw it."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it away."""
        self._bar.stop()

    def ended(self, outcome: Outcome) -> None:
        """Count a request that has ended."""
        self._num_failed += not outcome.is_whole
        failed = f"{self._num_failed:,} failed" if self._num_failed else ""
        self._bar.update(self._task, advance=1, failed=failed)


def print_summary(console: Console, summary: Summary) -> None:
    """Print throughput and latencies."""
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="dim")
    facts.add_column(justify="right")
    rows = [
        ("requests completed", f"{summary.num_completed:,}"),
        ("requests failed", f"{summary.num_failed:,}"),
        ("duration", f"{summary.duration_s:,.2f} s"),
        ("prompt tokens", f"{summary.num_prompt_tokens:,}"),
        ("output tokens", f"{summary.num_output_tokens:,}"),
        ("requests/s", f"{summary.requests_per_s:,.2f}"),
        ("output tokens/s", f"{summary.output_tokens_per_s:,.2f}"),
        ("tokens/s of prompts and outputs", f"{summary.tokens_per_s:,.2f}"),
        ("most output tokens in a second", f"{summary.peak_output_tokens:,}"),
        ("most requests at once", f"{summary.peak_concurrency:,}"),
    ]
    if summary.goodput_per_s is not None:
        rows.append(("requests/s within all goals", f"{summary.goodput_per_s:,.2f}"))
    for name, value in rows:
        facts.add_row(name, value)
    console.print(facts)
    console.print()
    times = Table(box=None, padding=(0, 2, 0, 0))
    times.add_column("milliseconds", style="dim")
    percentiles = [f"p{at:g}" for at, _ in summary.metrics["ttft"].percentiles]
    for name in ("mean", "median", "std", *percentiles):
        times.add_column(name, justify="right")
    for key, metric in summary.metrics.items():
        values = (metric.mean, metric.median, metric.std, *(value for _, value in metric.percentiles))
        cells = [f"{value:,.2f}" if metric.num else "-" for value in values]
        times.add_row(_NAMES[key], *cells)
    console.print(times)


def notes(run: LoadRun, summary: Summary, *, is_open: bool) -> list[str]:
    """Sentences on failures, and on a client that was the limit itself.

    Args:
        is_open: whether requests were to leave at their times.
    """
    found = [f"{count:,} failed: {kind}" for kind, count in sorted(summary.failures.items())]
    errors = Counter(each.error for each in run.outcomes if not each.is_whole and each.error)
    found += [f"{error} ({count:,} times)" for error, count in errors.most_common(_MOST_ERRORS)]
    if summary.num_counted_by_events:
        found.append(
            f"the server did not count the tokens of {summary.num_counted_by_events:,} answers: events were "
            "taken for tokens"
        )
    if run.cpu_share > _BUSY_SHARE:
        found.append(
            f"this client was busy for {run.cpu_share:.0%} of the time: its own work is part of the latencies"
        )
    if is_open and summary.lag.num and summary.lag.mean > _LATE_MS:
        found.append(
            f"requests were sent {summary.lag.mean:,.0f} ms late on average: the client is overloaded"
        )
    return found


_DEFAULT_NUM = 1000
_target_option = option_in("Server")
_work_option = option_in("Requests")
_pace_option = option_in("Pace")
"""Names of panels of the help."""


@dataclass(frozen=True)
class TargetOptions:
    """Options of the server and of its requests."""

    base_url: Annotated[str, _target_option("Address of the server.")] = "http://127.0.0.1:8000"
    endpoint: Annotated[str, _target_option("/v1/completions or /v1/chat/completions.")] = "/v1/completions"
    model: Annotated[
        str | None, _target_option("Model by the server's name.", show_default="its first one")
    ] = None
    api_key: Annotated[
        str | None,
        _target_option(
            "Key to send; better in the environment than on the command line.",
            envvar="OPENAI_API_KEY",
            show_default="none",
        ),
    ] = None
    header: Annotated[
        list[str] | None,
        _target_option("Further header; repeatable.", metavar="NAME=VALUE", show_default="none"),
    ] = None
    insecure: Annotated[bool, _target_option("Accept any TLS certificate.", "--insecure")] = False
    request_timeout: Annotated[float, _target_option("Timeout of a request in seconds.")] = 21600.0
    ready_timeout: Annotated[float, _target_option("Seconds to wait for a server that starts.")] = 0.0

    def headers(self) -> dict[str, str]:
        """Headers of every request.

        Raises:
            ValueError: one that is not NAME=VALUE.
        """
        found = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        found |= named_values("--header", self.header)
        if not "".join(f"{name}{value}" for name, value in found.items()).isprintable():
            raise ValueError("expected headers and a key without control characters")
        return found

    def settings(self) -> dict[str, Any]:
        """Settings for a result, without keys and headers."""
        return {"base_url": self.base_url, "endpoint": self.endpoint}


@dataclass(frozen=True)
class WorkOptions:
    """Options of the requests: those of a trace, or random ones."""

    trace: Annotated[
        Path | None,
        _work_option(
            "Requests of a trace: BurstGPT or Azure CSV, Mooncake JSON lines, ShareGPT JSON.",
            metavar="FILE",
            show_default="random requests",
        ),
    ] = None
    trace_format: Annotated[
        str | None, _work_option("burstgpt, azure, mooncake or sharegpt.", show_default="found out")
    ] = None
    num_prompts: Annotated[
        int | None, _work_option("Requests to send.", show_default=f"{_DEFAULT_NUM}, or the whole trace")
    ] = None
    input_len: Annotated[int, _work_option("Tokens of random prompts.")] = 1024
    output_len: Annotated[int, _work_option("Tokens of their outputs.")] = 128
    range_ratio: Annotated[float, _work_option("Lengths differ from these by up to this share.")] = 0.0
    prefix_len: Annotated[int, _work_option("Tokens that prompts share, in front of their own.")] = 0
    num_prefixes: Annotated[int, _work_option("Different shared beginnings.")] = 1
    length_scale: Annotated[float, _work_option("Multiplies all lengths of a trace.")] = 1.0
    max_total_tokens: Annotated[
        int | None, _work_option("Leave out longer requests.", show_default="none is left out")
    ] = None
    tokenizer: Annotated[
        Path | None,
        _work_option(
            "tokenizer.json or its directory: prompts are sent as texts.",
            metavar="PATH",
            show_default="prompts are sent as token ids",
        ),
    ] = None
    token_ids: Annotated[
        str,
        _work_option(
            "Ids of random prompts.", metavar="FIRST:END", show_default="300:1000, or those of --tokenizer"
        ),
    ] = ""

    def arrivals(self, pace: PaceOptions, texts: Texts | None, seed: int) -> list[Arrival]:
        """The requests in order of time.

        Raises:
            ValueError: a trace or a number that cannot be used, or no request at all.
        """
        import numpy as np

        from hpu_duo.lab.traces import (
            RandomLengths,
            TraceFormat,
            at_times,
            no_longer_than,
            read_trace,
            scaled,
        )

        rng = np.random.default_rng(seed)
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ValueError(f"expected --num-prompts of at least 1, got {self.num_prompts}")
        if self.trace is None:
            lengths = RandomLengths(
                self.input_len, self.output_len, self.range_ratio, self.prefix_len, self.num_prefixes
            )
            found = lengths.draw(self.num_prompts or _DEFAULT_NUM, pace.rate(), rng, fixes_mean=True)
        else:
            kind = None if self.trace_format is None else TraceFormat.parse(self.trace_format)
            count = None if texts is None else texts.count
            trace = read_trace(self.trace, kind, limit=self.num_prompts, count_tokens=count)
            found = scaled(trace.arrivals, speed=pace.speed, lengths=self.length_scale)
            if pace.request_rate is not None or not trace.has_times:
                found = at_times(found, pace.rate().times(len(found), rng, fixes_mean=True).tolist())
        if self.max_total_tokens is not None:
            found = no_longer_than(found, self.max_total_tokens)
        if not found:
            raise ValueError(f"expected a request of at most {self.max_total_tokens} tokens, got none")
        return found

    def settings(self, pace: PaceOptions) -> dict[str, Any]:
        """Settings for a result, with those of the pace."""
        lengths = ("input_len", "output_len", "range_ratio", "prefix_len", "num_prefixes")
        rate = pace.request_rate
        if self.trace is None or pace.request_rate is not None:
            rate = math.inf if rate is None else rate
        return {
            "trace": None if self.trace is None else self.trace.name,
            **({name: getattr(self, name) for name in lengths} if self.trace is None else {}),
            "length_scale": self.length_scale,
            "max_total_tokens": self.max_total_tokens,
            "request_rate": "inf" if rate == math.inf else rate,
            "burstiness": pace.burstiness,
            "speed": pace.speed,
            "max_concurrency": pace.max_concurrency,
        }

    def prompt_ids(self, texts: Texts | None, seed: int) -> PromptIds:
        """Return the source of random prompts.

        Raises:
            ValueError: --token-ids that are no range.
        """
        from hpu_duo.lab.traces import PromptIds

        if not self.token_ids and texts is not None:
            return PromptIds(texts.vocabulary, seed)
        first, _, end = (self.token_ids or "300:1000").partition(":")
        if not (first.isdecimal() and end.isdecimal() and int(first) < int(end) <= 2**31):
            raise ValueError(f"expected --token-ids such as 300:1000, got {self.token_ids!r}")
        return PromptIds(range(int(first), int(end)), seed)


@dataclass(frozen=True)
class PaceOptions:
    """Options of the times of requests."""

    request_rate: Annotated[
        float | None,
        _pace_option(
            "Requests per second, or inf for all at once.", show_default="inf, or the times of the trace"
        ),
    ] = None
    burstiness: Annotated[
        float, _pace_option("Shape of the gamma distribution of gaps: 1 is Poisson, less comes in bursts.")
    ] = 1.0
    speed: Annotated[float, _pace_option("How many times as fast a trace is run.")] = 1.0
    max_concurrency: Annotated[
        int | None,
        _pace_option(
            "Most concurrent requests; others wait in the client.", show_default="no limit: the loop is open"
        ),
    ] = None
    num_warmups: Annotated[int, _pace_option("Requests sent before, that do not count.", min=0)] = 1

    def rate(self) -> Rate:
        """The rate at which requests come by themselves.

        Raises:
            ValueError: see ``hpu_duo.lab.traces.Rate``.
        """
        from hpu_duo.lab.traces import Rate

        return Rate(math.inf if self.request_rate is None else self.request_rate, self.burstiness)


def extra_fields(text: str | None, temperature: float, ignore_eos: bool) -> dict[str, Any]:
    """Fields of every body that the options ask for.

    Raises:
        ValueError: --extra-body is no JSON object.
    """
    fields: dict[str, Any] = {"temperature": temperature}
    if ignore_eos:
        fields["ignore_eos"] = True
    if text is not None:
        try:
            given = json.loads(text)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise ValueError(f"expected a JSON object in --extra-body, got {text!r}")
        fields |= given
    return fields


def named_values(name: str, texts: list[str] | None) -> dict[str, str]:
    """NAME=VALUE of a repeatable option as a dictionary; ValueError for something else."""
    found = {}
    for text in texts or []:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise ValueError(f"expected {name} NAME=VALUE, got {text!r}")
        found[key] = value
    return found


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
        bool, typer.Option("--ignore-eos", help="Request outputs of full length (vLLM's ignore_eos).")
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
        typer.Option(metavar="NAME=VALUE", help="Stored in the result; repeatable.", show_default="none"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the result as JSON.", show_default="not written"),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Include every request and its text in the result.")
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
        from hpu_duo.lab.load import Endpoint, Goals, Pace, Summary, result_fields
        from hpu_duo.lab.load.client import Client, ServerError
        from hpu_duo.lab.load.measure import Measurement

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
    from hpu_duo.lab.load.texts import Texts

    return None if path is None else Texts(path)
