"""Options of what a server tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpu_duo.extras import install_command
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.server.telemetry.request_log import RequestLog
    from hpu_duo.server.telemetry.tracing import Tracing

_TELLING = "Telling"


@dataclass(frozen=True)
class TellingOptions:
    """Options of what a server tells of calls and steps."""

    log_requests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Append a line of JSON for each call, without prompts and answers; - for standard output.",
            show_default="not logged",
            rich_help_panel=_TELLING,
        ),
    ] = None
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts into it as well.", rich_help_panel=_TELLING)
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            envvar="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            metavar="URL",
            help="Send a span for each call there, by OTLP over HTTP.",
            show_default="no traces",
            rich_help_panel=_TELLING,
        ),
    ] = None
    metrics_namespace: Annotated[
        str,
        typer.Option(
            help="Prefix of the metrics that mean what vLLM's mean; vllm lets its dashboards work.",
            rich_help_panel=_TELLING,
        ),
    ] = "hpuduo"

    def request_log(self) -> RequestLog | None:
        """The log of calls; None without.

        Raises:
            ValueError: its file cannot be written.
        """
        from hpu_duo.server.telemetry.request_log import RequestLog

        if self.log_requests is None:
            if self.log_prompts:
                raise ValueError("--log-prompts adds to the log of calls: expected --log-requests too")
            return None
        if str(self.log_requests) == "-":
            return RequestLog(None, has_prompts=self.log_prompts)
        check_file("--log-requests", self.log_requests)
        return RequestLog(self.log_requests, has_prompts=self.log_prompts)

    def tracing(self) -> Tracing | None:
        """Spans of calls; None without.

        Raises:
            ValueError: the packages are missing.
        """
        if not self.otlp_traces_endpoint:
            return None
        try:
            from hpu_duo.server.telemetry.tracing import Tracing
        except ImportError as error:
            raise ValueError(
                "--otlp-traces-endpoint needs the packages of the extra tracing: "
                f"{install_command('tracing')}"
            ) from error
        return Tracing(self.otlp_traces_endpoint)
