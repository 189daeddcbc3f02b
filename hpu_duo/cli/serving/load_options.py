"""Options of ``hpu-duo bench serve``; names are those of vLLM's ``bench serve`` where it has them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hpu_duo.load.texts import Texts
    from hpu_duo.traces import Arrival, PromptIds, Rate

_DEFAULT_NUM = 1000
_TARGET, _WORK, _PACE = "Server", "Requests", "Pace"
"""Names of panels of the help."""


@dataclass(frozen=True)
class TargetOptions:
    """Options of the server and of its requests."""

    base_url: Annotated[str, typer.Option(help="Address of the server.", rich_help_panel=_TARGET)] = (
        "http://127.0.0.1:8000"
    )
    endpoint: Annotated[
        str, typer.Option(help="/v1/completions or /v1/chat/completions.", rich_help_panel=_TARGET)
    ] = "/v1/completions"
    model: Annotated[
        str | None,
        typer.Option(
            help="Model by the server's name.", show_default="its first one", rich_help_panel=_TARGET
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY",
            help="Key to send; better in the environment than on the command line.",
            show_default="none",
            rich_help_panel=_TARGET,
        ),
    ] = None
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Further header; repeatable.",
            show_default="none",
            rich_help_panel=_TARGET,
        ),
    ] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Take any TLS certificate.", rich_help_panel=_TARGET)
    ] = False
    request_timeout: Annotated[
        float, typer.Option(help="Seconds that a request may take.", rich_help_panel=_TARGET)
    ] = 21600.0
    ready_timeout: Annotated[
        float, typer.Option(help="Seconds to wait for a server that starts.", rich_help_panel=_TARGET)
    ] = 0.0

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
        typer.Option(
            metavar="FILE",
            help="Requests of a trace: BurstGPT or Azure CSV, Mooncake JSON lines, ShareGPT JSON.",
            show_default="random requests",
            rich_help_panel=_WORK,
        ),
    ] = None
    trace_format: Annotated[
        str | None,
        typer.Option(
            help="burstgpt, azure, mooncake or sharegpt.", show_default="found out", rich_help_panel=_WORK
        ),
    ] = None
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Requests to send.",
            show_default=f"{_DEFAULT_NUM}, or the whole trace",
            rich_help_panel=_WORK,
        ),
    ] = None
    input_len: Annotated[int, typer.Option(help="Tokens of random prompts.", rich_help_panel=_WORK)] = 1024
    output_len: Annotated[int, typer.Option(help="Tokens of their outputs.", rich_help_panel=_WORK)] = 128
    range_ratio: Annotated[
        float,
        typer.Option(help="Lengths differ from these by up to this share.", rich_help_panel=_WORK),
    ] = 0.0
    prefix_len: Annotated[
        int, typer.Option(help="Tokens that prompts share, in front of their own.", rich_help_panel=_WORK)
    ] = 0
    num_prefixes: Annotated[int, typer.Option(help="Different shared beginnings.", rich_help_panel=_WORK)] = 1
    length_scale: Annotated[
        float, typer.Option(help="Multiplies all lengths of a trace.", rich_help_panel=_WORK)
    ] = 1.0
    max_total_tokens: Annotated[
        int | None,
        typer.Option(
            help="Leave out longer requests.", show_default="none is left out", rich_help_panel=_WORK
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="tokenizer.json or its directory: prompts are sent as texts.",
            show_default="prompts are sent as token ids",
            rich_help_panel=_WORK,
        ),
    ] = None
    token_ids: Annotated[
        str,
        typer.Option(
            metavar="FIRST:END",
            help="Ids that random prompts are made of.",
            show_default="300:1000, or those of --tokenizer",
            rich_help_panel=_WORK,
        ),
    ] = ""

    def arrivals(self, pace: PaceOptions, texts: Texts | None, seed: int) -> list[Arrival]:
        """The requests in order of time.

        Raises:
            ValueError: a trace or a number that cannot be used, or no request at all.
        """
        import numpy as np

        from hpu_duo.traces import RandomLengths, TraceFormat, at_times, no_longer_than, read_trace, scaled

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
        from hpu_duo.traces import PromptIds

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
        typer.Option(
            help="Requests per second, or inf for all at once.",
            show_default="inf, or the times of the trace",
            rich_help_panel=_PACE,
        ),
    ] = None
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the gamma distribution of gaps: 1 is Poisson, less comes in bursts.",
            rich_help_panel=_PACE,
        ),
    ] = 1.0
    speed: Annotated[
        float, typer.Option(help="How many times as fast a trace is run.", rich_help_panel=_PACE)
    ] = 1.0
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            help="Requests under way at most; others wait here.",
            show_default="no limit: the loop is open",
            rich_help_panel=_PACE,
        ),
    ] = None
    num_warmups: Annotated[
        int,
        typer.Option(min=0, help="Requests sent before, that do not count.", rich_help_panel=_PACE),
    ] = 1

    def rate(self) -> Rate:
        """The rate at which requests come by themselves.

        Raises:
            ValueError: see ``hpu_duo.traces.Rate``.
        """
        from hpu_duo.traces import Rate

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
