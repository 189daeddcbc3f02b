"""Options of what calls may ask for, and of the engine that serves them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpu_duo.cli.arguments.options import ENGINE, EngineOptions
from hpu_duo.cli.serving.listening_options import ListeningOptions
from hpu_duo.cli.serving.telling_options import TellingOptions
from hpu_duo.cli.terminal.sizes import parse_bytes

if TYPE_CHECKING:
    from hpu_duo.server.config import ServerConfig

_CALLS = "Calls"


@dataclass(frozen=True)
class CallOptions:
    """Options of what calls may request, and what they are answered."""

    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name of the model in the API; repeat for several.",
            show_default="its id on the hub, or that of its directory",
            rich_help_panel=_CALLS,
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Chat template.", show_default="the checkpoint's", rich_help_panel=_CALLS
        ),
    ] = None
    tool_call_parser: Annotated[
        str,
        typer.Option(
            help="Format of tool calls: auto (by the chat template), hermes, llama3_json or none.",
            rich_help_panel=_CALLS,
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        typer.Option(
            help="Defaults of sampling: auto (the checkpoint's) or none (the API's).", rich_help_panel=_CALLS
        ),
    ] = "auto"
    max_queue: Annotated[
        int,
        typer.Option(
            help="Samples that may wait besides those that run; more are answered with 429.",
            rich_help_panel=_CALLS,
        ),
    ] = 2048
    max_body_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Longest body of a call.", rich_help_panel=_CALLS)
    ] = "64MiB"
    max_choices: Annotated[
        int, typer.Option(help="Most choices of one call: prompts times n.", rich_help_panel=_CALLS)
    ] = 256
    max_logprobs: Annotated[
        int,
        typer.Option(help="Most logprobs and top_logprobs; -1 for any number.", rich_help_panel=_CALLS),
    ] = 20
    max_answer_size: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Most memory of the outputs of one call.", rich_help_panel=_CALLS),
    ] = "256MiB"
    answer_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Most memory of the outputs of all calls together; with more, the call that takes most is "
            "ended and new ones get 503.",
            rich_help_panel=_CALLS,
        ),
    ] = "1GiB"
    drain_seconds: Annotated[
        float,
        typer.Option(
            help="After SIGTERM or Ctrl-C, so long for calls under way to end.", rich_help_panel=_CALLS
        ),
    ] = 30.0
    flush_seconds: Annotated[
        float,
        typer.Option(
            help="Behind that, so long for slow callers to get the rest of their answers.",
            rich_help_panel=_CALLS,
        ),
    ] = 5.0

    def config(
        self, model: Path | None, listening: ListeningOptions, telling: TellingOptions
    ) -> ServerConfig:
        """Settings of the server.

        Args:
            model: None is the built-in model.

        Raises:
            ValueError: a value is out of range, or a file cannot be read.
        """
        from hpu_duo.modeling.model_files import model_name
        from hpu_duo.server.config import ServerConfig
        from hpu_duo.server.tools import resolve_parser

        resolve_parser(self.tool_call_parser)
        if self.generation_config not in ("auto", "none"):
            raise ValueError(f"expected --generation-config of auto or none, got {self.generation_config!r}")
        own_name = "builtin" if model is None else model_name(model) if model.exists() else str(model)
        return ServerConfig(
            model_names=tuple(self.served_model_name or (own_name,)),
            api_keys=listening.keys,
            metrics_api_keys=tuple(listening.metrics_api_key or ()),
            shares_prefixes=listening.share_prefixes,
            max_queue=self.max_queue,
            max_body_bytes=parse_bytes(self.max_body_size),
            max_choices=self.max_choices,
            max_logprobs=self.max_logprobs,
            max_answer_bytes=parse_bytes(self.max_answer_size),
            answer_memory_bytes=parse_bytes(self.answer_memory),
            drain_seconds=self.drain_seconds,
            flush_seconds=self.flush_seconds,
            allowed_origins=tuple(listening.allowed_origin or ()),
            chat_template=None if self.chat_template is None else _read_template(self.chat_template),
            tool_call_parser=self.tool_call_parser,
            uses_generation_config=self.generation_config == "auto",
            has_page=listening.page,
            metrics_namespace=telling.metrics_namespace,
        )


@dataclass(frozen=True)
class ServingEngineOptions(EngineOptions):
    """Options of an engine that serves for long, so that what is captured pays."""

    graphs: Annotated[
        str,
        typer.Option(
            help="How steps are captured: auto, eager, replay, compile, cuda, hpu-compile or hpu-graph.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto"


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read --chat-template {file}: {error}") from error
