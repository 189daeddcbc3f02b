"""Options of the requests that are simulated: drawn by a generator, or those of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hpu_duo.lab.simulate.forecast import Forecast
    from hpu_duo.lab.traces import Session

_REQUESTS = "Requests"
_DEFAULT_NUM = 1000


@dataclass(frozen=True)
class Asked:
    """Sessions to serve.

    Attributes:
        sessions: those that a server can hold.
        num_left_out: requests that were longer.
        settings: where they come from, for a result.
    """

    sessions: tuple[Session, ...]
    num_left_out: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class RequestOptions:
    """Options of the requests."""

    workload: Annotated[
        str,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            help="poisson, bursts, chats, agents, documents or flood, such as chats:turns=8,outputs=300~0.8; "
            "docs/simulate.md has the options.",
            rich_help_panel=_REQUESTS,
        ),
    ] = "poisson"
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Requests of a trace: BurstGPT or Azure CSV, Mooncake JSON lines, ShareGPT JSON.",
            show_default="drawn by --workload",
            rich_help_panel=_REQUESTS,
        ),
    ] = None
    trace_format: Annotated[
        str | None,
        typer.Option(
            help="burstgpt, azure, mooncake or sharegpt.", show_default="found out", rich_help_panel=_REQUESTS
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="tokenizer.json or its directory, which counts the tokens of ShareGPT.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None
    num_requests: Annotated[
        int | None,
        typer.Option(
            help="Requests to serve.",
            show_default=f"{_DEFAULT_NUM}, or the whole trace",
            rich_help_panel=_REQUESTS,
        ),
    ] = None
    request_rate: Annotated[
        float | None,
        typer.Option(
            help="Requests of a trace per second, at random times; inf for all at once.",
            show_default="the times of the trace",
            rich_help_panel=_REQUESTS,
        ),
    ] = None
    burstiness: Annotated[
        float,
        typer.Option(
            help="With --request-rate, the shape of the gamma distribution of gaps: 1 is Poisson, less comes "
            "in bursts.",
            rich_help_panel=_REQUESTS,
        ),
    ] = 1.0
    speed: Annotated[
        float, typer.Option(help="How many times as fast a trace is run.", rich_help_panel=_REQUESTS)
    ] = 1.0
    length_scale: Annotated[
        float, typer.Option(help="Multiplies all lengths of a trace.", rich_help_panel=_REQUESTS)
    ] = 1.0
    length_error: Annotated[
        float,
        typer.Option(
            help="Spread of the error of expected output lengths, as the standard deviation of the "
            "logarithm; with 0 policies know the lengths.",
            rich_help_panel=_REQUESTS,
        ),
    ] = 0.0
    ranker: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Of hpu-duo train-ranker, for policies that need one.",
            show_default="the expected lengths of outputs",
            rich_help_panel=_REQUESTS,
        ),
    ] = None

    @property
    def forecast(self) -> Forecast:
        """Knowledge that policies have of outputs.

        Raises:
            ValueError: a number out of range, or a ranker that cannot be read or used.
        """
        from hpu_duo.lab.simulate.forecast import Forecast

        if self.ranker is None:
            return Forecast(self.length_error)
        from hpu_duo.lab.load.texts import Texts
        from hpu_duo.scheduling.ranker import load_ranker

        if self.tokenizer is None:
            return Forecast(self.length_error, load_ranker(self.ranker))
        if self.length_scale != 1:
            raise ValueError(f"expected --length-scale 1 for a ranker of texts, got {self.length_scale}")
        return Forecast(self.length_error, load_ranker(self.ranker), Texts(self.tokenizer).encode)

    def sessions(self, max_len: int, seed: int) -> Asked:
        """The requests that a server can hold.

        Args:
            max_len: tokens of the longest request that it can.

        Raises:
            ValueError: a trace or a number that cannot be used, or no request at all.
        """
        from hpu_duo.lab.traces import count_requests

        if self.num_requests is not None and self.num_requests < 1:
            raise ValueError(f"expected --num-requests of at least 1, got {self.num_requests}")
        if self.trace is None:
            asked, settings = self._drawn(seed), {"workload": self.workload}
        else:
            asked, settings = self._of_trace(self.trace, seed), self._trace_settings()
        kept = tuple(one for each in asked if (one := each.no_longer_than(max_len)) is not None)
        if not kept:
            shortest = min(each.first.num_tokens for each in asked)
            raise ValueError(
                f"expected a request of at most {max_len} tokens, which the server can hold; the shortest "
                f"has {shortest}: {self._shorter(max_len, shortest, seed)}"
            )
        return Asked(kept, count_requests(asked) - count_requests(kept), settings)

    def _shorter(self, max_len: int, shortest: int, seed: int) -> str:
        """Options that make requests short enough."""
        from hpu_duo.lab.traces import make_workload, with_shorter

        if self.trace is not None:
            return f"give --length-scale {self.length_scale * max_len / (2 * shortest):.2g}"
        # Spreads and the turns of conversations need room too.
        return (
            f"give --workload {with_shorter(self.workload, make_workload(self.workload, seed), max_len // 2)}"
        )

    def _drawn(self, seed: int) -> list[Session]:
        from hpu_duo.lab.traces import make_workload

        for name, value in (("--request-rate", self.request_rate), ("--tokenizer", self.tokenizer)):
            if value is not None:
                raise ValueError(f"expected {name} with --trace; a workload has a rate of its own, per_s")
        return make_workload(self.workload, seed=seed).sessions(self.num_requests or _DEFAULT_NUM)

    def _of_trace(self, path: Path, seed: int) -> list[Session]:
        import numpy as np

        from hpu_duo.lab.load.texts import Texts
        from hpu_duo.lab.traces import Rate, Session, TraceFormat, at_times, read_trace, scaled

        kind = None if self.trace_format is None else TraceFormat.parse(self.trace_format)
        count = None if self.tokenizer is None else Texts(self.tokenizer).count
        trace = read_trace(path, kind, limit=self.num_requests, count_tokens=count)
        found = scaled(trace.arrivals, speed=self.speed, lengths=self.length_scale)
        if self.request_rate is not None or not trace.has_times:
            rate = Rate(float("inf") if self.request_rate is None else self.request_rate, self.burstiness)
            times = rate.times(len(found), np.random.default_rng(seed), fixes_mean=True)
            found = at_times(found, times.tolist())
        return list(map(Session, found))

    def _trace_settings(self) -> dict[str, Any]:
        rate = self.request_rate
        return {
            "trace": None if self.trace is None else self.trace.name,
            "speed": self.speed,
            "length_scale": self.length_scale,
            "request_rate": "inf" if rate == float("inf") else rate,
            "burstiness": self.burstiness,
        }
