"""``hpu-duo generate --offline``: prompts of a file, and a line of JSON for each result."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hpu_duo.cli.options import encode, load_model, read_text, tokenizer_of
from hpu_duo.cli.terminal import user_errors
from hpu_duo.config.engine import SETTINGS
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.config.overrides import EngineOverrides
    from hpu_duo.generation.offline import OfflineResult
    from hpu_duo.llm import HPUDuoModel
    from hpu_duo.sampling import SamplingParams

FAILED = 1
_SAMPLING = {
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop"),
}
_PLACING = (
    *("offload_policy", "cpu_offload_gb", "offload_num_batches", "cpu_attention"),
    "tensor_parallel_size",
)
"""Settings that do not go with the search, or that replace it."""


@dataclass(frozen=True)
class Item:
    """A prompt as it was given.

    Attributes:
        prompt: a text or token ids.
        sampling: parameters of its own.
        name: ``id`` of its line.
        where: file and line, for errors.
        problem: why its line cannot be read.
    """

    prompt: str | Sequence[int] = ""
    sampling: dict[str, Any] | None = None
    name: Any = None
    where: str = ""
    problem: ValueError | None = None


def read_items(files: Sequence[str]) -> list[Item]:
    """Read files of prompts.

    Args:
        files: of lines, ``-`` is standard input. A line of a ``.jsonl`` file is an object with ``prompt``, a
            text or token ids, and may have an ``id`` and sampling parameters; any other line is a text. Empty
            lines are left out.

    Raises:
        ValueError: a file cannot be read.
    """
    return [
        replace(
            _item(line) if name.endswith(".jsonl") else Item(line.removesuffix("\r")),
            where=f"{name}, line {number}",
        )
        for name in files
        # JSON and texts may have other separators of str.splitlines, such as U+2028.
        for number, line in enumerate(read_text(name).split("\n"), start=1)
        if line.strip()
    ]


def _item(line: str) -> Item:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Item(problem=ValueError(f"expected an object of JSON: {error}"))
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str | list):
        problem = f"expected an object with a prompt, a text or token ids, got {line:.60}"
        return Item(problem=ValueError(problem))
    prompt, name = fields.pop("prompt"), fields.pop("id", None)
    if unknown := sorted(set(fields) - _SAMPLING):
        problem = f"expected {', '.join(sorted(_SAMPLING))} beside id and prompt, got {unknown[0]!r}"
        return Item(name=name, problem=ValueError(problem))
    return Item(prompt, fields, name)


def run_offline(
    model: Path | None,
    engine: EngineOverrides,
    items: Sequence[Item],
    sampling: dict[str, Any],
    output: Path | None,
    *,
    is_chat: bool,
    seed: int,
) -> None:
    """Load a model, serve all prompts, and write a line for each.

    Without other options of placement, ``offload_policy`` is "auto" on one device.

    Raises:
        typer.Exit: a prompt failed, a shape was not captured, or the user has interrupted; what had ended
            by then is written, as it is before any other error.
    """
    with user_errors():
        if not items:
            raise ValueError("expected a prompt: --prompt TEXT, --file PATH or --prompts PATH")
        if output is not None:
            check_file("--output", output)
        settings = dict(engine)
        if all(settings.get(name, SETTINGS[name].default) == SETTINGS[name].default for name in _PLACING):
            settings["offload_policy"] = "auto"
        loaded = load_model(model, cast("EngineOverrides", settings), len(items), seed)
    stats = loaded.stats()
    typer.echo(f"hpu-duo: {stats.resolved.computation}", err=True)
    for note in stats.notes:
        typer.echo(f"hpu-duo: {note}", err=True)
    from graphs import GraphMissError, RecompileError

    with ExitStack() as stack:
        file: TextIO = sys.stdout
        if output is not None:
            file = stack.enter_context(output.open("w", encoding="utf-8"))
        lines = _Lines(file)
        try:
            with user_errors((RecompileError, GraphMissError)):
                _serve(loaded, items, sampling, lines, is_chat=is_chat)
        finally:
            lines.end(len(items))
    if lines.num_failed:
        raise typer.Exit(FAILED)


class _Lines:
    """Results of prompts, each written as soon as all before it are there.

    Args:
        file: to write to.
    """

    def __init__(self, file: TextIO) -> None:
        self.file, self.num_put, self.num_failed = file, 0, 0
        self._waiting: dict[int, dict[str, Any]] = {}
        self._next, self._num_tokens, self._began = 0, 0, time.perf_counter()

    def put(self, place: int, fields: dict[str, Any]) -> None:
        """Write the line of a prompt, or store it until its turn."""
        self.num_put += 1
        self.num_failed += fields["error"] is not None
        self._num_tokens += len(fields["token_ids"])
        self._waiting[place] = fields
        while self._next in self._waiting:
            self._write(self._next)
            self._next += 1

    def end(self, num_prompts: int) -> None:
        """Write what still waits for others, and the counts for the user."""
        for place in sorted(self._waiting):
            self._write(place)
        seconds = time.perf_counter() - self._began
        typer.echo(
            f"hpu-duo: {self.num_put - self.num_failed} of {num_prompts} prompts, {self._num_tokens:,} "
            f"output tokens in {seconds:,.1f} s, {self._num_tokens / seconds:,.1f} tokens/s",
            err=True,
        )

    def _write(self, place: int) -> None:
        self.file.write(json.dumps(self._waiting[place]) + "\n")
        self.file.flush()
        del self._waiting[place]


def _serve(
    loaded: HPUDuoModel, items: Sequence[Item], sampling: dict[str, Any], lines: _Lines, *, is_chat: bool
) -> None:
    """Put the fields of each prompt into ``lines``."""
    from hpu_duo.generation.offline import OfflineBatch

    prompts, params, places = [], list[Any](), []
    for place, item in enumerate(items):
        try:
            if item.problem is not None:
                raise item.problem
            one = _params({**sampling, **(item.sampling or {})})
            text = item.prompt
            if is_chat and isinstance(text, str):
                text = encode(tokenizer_of(loaded), text, is_chat)
            prompts.append(text)
        except (TypeError, ValueError) as error:
            lines.put(place, _fields(place, item, error=error))
        else:
            params.append(one)
            places.append(place)
    console = Console(stderr=True)
    columns = TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    is_hidden = lines.file.isatty() or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        task = progress.add_task("prompts", total=len(items), completed=lines.num_put)

        def put(result: OfflineResult) -> None:
            place = places[result.index]
            lines.put(place, _fields(place, items[place], result))
            progress.advance(task)

        if prompts:
            OfflineBatch(loaded.engine, loaded.tokenizer, prompts, params, places).run(put)


def _params(fields: dict[str, Any]) -> SamplingParams:
    from hpu_duo.sampling import SamplingParams

    return SamplingParams(**fields)


def _fields(
    place: int, item: Item, result: OfflineResult | None = None, error: Exception | None = None
) -> dict[str, Any]:
    """The line of a prompt."""
    error = error if result is None else result.error
    sample = result.samples[0] if result is not None and result.samples else None
    return {
        "index": place,
        "id": item.name,
        "text": None if sample is None else sample.text,
        "token_ids": [] if sample is None else sample.token_ids,
        "finish_reason": None if sample is None else str(sample.finish_reason),
        "num_prompt_tokens": 0 if result is None else len(result.prompt_token_ids),
        "error": None if error is None else f"{item.where}: {error}".removeprefix(": "),
    }
