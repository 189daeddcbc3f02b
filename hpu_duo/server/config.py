"""Settings of a server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hpu_duo.config.option import option

LISTENING, CALLS, OBSERVABILITY = "Listening", "Calls", "Observability"
"""Panels of the help of ``hpu-duo serve``."""

_METRIC_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server, independent of model and address.

    Fields that are options of ``hpu-duo serve`` have their own texts.

    Attributes:
        model_names: names under which the model is served; answers have the requested one.
        api_keys: keys of callers; empty = no key is needed.
        metrics_api_keys: keys for metrics and statistics; empty = no key is needed.
        max_answer_bytes: see ``running.Holding``.
        answer_memory_bytes: see ``running.AnswerMemory``.
        max_behind: most unread outputs of one stream, beyond which it is aborted.
        quiet_s: seconds of silence after which a stream gets a comment: less than the timeouts of proxies,
            and no more often than the HTML standard advises (section 9.2.7), since not every client supports
            comments.
        allowed_origins: origins whose pages may call (CORS); empty for none, ``*`` for all.
        chat_template: source of a template that replaces the checkpoint's.
        tool_call_parser: ``auto``, ``none`` or one of ``hpu_duo.server.tools.PARSERS``.
        uses_generation_config: read defaults of sampling from the checkpoint's generation_config.json.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    metrics_api_keys: tuple[str, ...] = ()
    shares_prefixes: bool = option(
        False,
        (
            "Share cached prefixes among callers with different keys; cached_tokens then reveals "
            "prompts of others."
        ),
        LISTENING,
        name="share_prefixes",
        flags=("--share-prefixes",),
    )
    max_queue: int = option(
        2048, "Samples that may wait besides those that run; for more, the status is 429.", CALLS
    )
    max_body_bytes: int = option(
        64 * 2**20, "Longest body of a call.", CALLS, name="max_body_size", metavar="SIZE", is_size=True
    )
    max_choices: int = option(256, "Most choices of one call: prompts times n.", CALLS)
    max_logprobs: int = option(20, "Most logprobs and top_logprobs; -1 for any number.", CALLS)
    max_answer_bytes: int = option(
        256 * 2**20,
        "Most memory of the outputs of one call.",
        CALLS,
        name="max_answer_size",
        metavar="SIZE",
        is_size=True,
    )
    answer_memory_bytes: int = option(
        2**30,
        "Most memory of the outputs of all calls together: 1GiB, or --max-answer-size if that is more. "
        "With more, the largest call is aborted and new ones get 503.",
        CALLS,
        name="answer_memory",
        metavar="SIZE",
        is_size=True,
    )
    max_behind: int = 8192
    drain_seconds: float = option(30.0, "Seconds for running calls to end after SIGTERM or Ctrl-C.", CALLS)
    flush_seconds: float = option(
        5.0, "Further seconds for slow callers to read the rest of their answers.", CALLS
    )
    quiet_s: float = 15.0
    allowed_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_call_parser: str = option(
        "auto",
        "Format of tool calls: auto (by the chat template), hermes, llama3_json or none.",
        CALLS,
    )
    uses_generation_config: bool = True
    has_page: bool = option(
        True, "Serve a chat page at /.", LISTENING, name="page", flags=("--page/--no-page",)
    )
    metrics_namespace: str = option(
        "hpuduo", "Prefix of the metrics with vLLM's names; with vllm, its dashboards work.", OBSERVABILITY
    )

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_choices", "max_answer_bytes", "max_behind"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of 1 or more, got {getattr(self, name)}")
        for name in ("max_queue", "drain_seconds", "flush_seconds", "quiet_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"expected {name} of 0 or more, got {getattr(self, name)}")
        if self.answer_memory_bytes < self.max_answer_bytes:
            raise ValueError(
                "expected answer_memory_bytes (--answer-memory) of at least max_answer_bytes "
                f"(--max-answer-size), {self.max_answer_bytes:,}, got {self.answer_memory_bytes:,}"
            )
        if self.max_logprobs < -1:
            raise ValueError(f"expected max_logprobs of -1 (no limit), 0 or more, got {self.max_logprobs}")
        if not self.model_names or not all(self.model_names):
            raise ValueError(f"expected names to serve the model under, got {self.model_names}")
        if not _METRIC_PREFIX.fullmatch(self.metrics_namespace):
            raise ValueError(
                "expected a metrics_namespace of letters, digits and _, without a leading digit, got "
                f"{self.metrics_namespace!r}"
            )
        if not all(self.api_keys + self.metrics_api_keys):
            raise ValueError("expected API keys of one or more characters, got an empty one")


def read_api_keys(file: Path) -> tuple[str, ...]:
    """Read keys from a file, one per line; lines that begin with # are ignored.

    Raises:
        ValueError: it cannot be read, or has none.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the file of API keys {file}: {error}") from error
    found = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not found:
        raise ValueError(f"expected a key in the file of API keys {file}, found none")
    return found
