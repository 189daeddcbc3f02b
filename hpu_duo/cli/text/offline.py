"""``hpu-duo generate --offline``: prompts of a file, and a line of JSON for each result."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hpu_duo.cli.options import encode, load_model, read_text, tokenizer_of
from hpu_duo.cli.terminal import INTERRUPTED, user_errors
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
_PLACING = ("offload_policy", "cpu_offload_gb", "offload_num_batches", "cpu_attention")


@dataclass(frozen=True)
class Item:
    """A prompt as it was given.

    Attributes:
        prompt: a text or token ids.
        sampling: parameters of its own.
        name: ``id`` of its line.
        problem: why its line cannot be read.
    """

    prompt: str | Sequence[int] = ""
    sampling: dict[str, Any] | None = None
    name: Any = None
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
        _item(line, f"{name}, line {number}") if name.endswith(".jsonl") else Item(line)
        for name in files
        for number, line in enumerate(read_text(name).splitlines(), start=1)
        if line.strip()
    ]


def _item(line: str, where: str) -> Item:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Item(problem=ValueError(f"{where}: expected an object of JSON: {error}"))
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str | list):
        return Item(
            problem=ValueError(
                f"{where}: expected an object with a prompt, a text or token ids, got {line:.60}"
            )
        )
    prompt, name = fields.pop("prompt"), fields.pop("id", None)
    if unknown := sorted(set(fields) - _SAMPLING):
        problem = f"{where}: expected {', '.join(sorted(_SAMPLING))} beside id and prompt, got {unknown[0]!r}"
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

    Without other options of placement, ``offload_policy`` is "auto".

    Raises:
        typer.Exit: a prompt failed, or the user has interrupted; what had ended by then is written.
    """
    with user_errors():
        if not items:
            raise ValueError("expected a prompt: --prompt TEXT, --file PATH or --prompts PATH")
        if output is not None:
            check_file("--output", output)
        settings = dict(engine)
        if not any(settings.get(name) for name in _PLACING):
            settings["offload_policy"] = "auto"
        loaded = load_model(model, cast("EngineOverrides", settings), len(items), seed)
    stats = loaded.stats()
    typer.echo(f"hpu-duo: {stats.resolved.computation}", err=True)
    for note in stats.notes:
        typer.echo(f"hpu-duo: {note}", err=True)
    results, is_interrupted, began = dict[int, Any](), False, time.perf_counter()
    try:
        _serve(loaded, items, sampling, results, is_chat=is_chat)
    except KeyboardInterrupt:
        is_interrupted = True
    seconds = time.perf_counter() - began
    with ExitStack() as stack:
        file: TextIO = sys.stdout
        if output is not None:
            file = stack.enter_context(output.open("w", encoding="utf-8"))
        for index in sorted(results):
            file.write(json.dumps(results[index], ensure_ascii=False) + "\n")
    num_failed = sum(one["error"] is not None for one in results.values())
    num_tokens = sum(len(one["token_ids"]) for one in results.values())
    typer.echo(
        f"hpu-duo: {len(results) - num_failed} of {len(items)} prompts, {num_tokens:,} output tokens in "
        f"{seconds:,.1f} s, {num_tokens / seconds:,.1f} tokens/s",
        err=True,
    )
    if num_failed or is_interrupted:
        raise typer.Exit(INTERRUPTED if is_interrupted else FAILED)


def _serve(
    loaded: HPUDuoModel,
    items: Sequence[Item],
    sampling: dict[str, Any],
    results: dict[int, Any],
    *,
    is_chat: bool,
) -> None:
    """Fill ``results`` with the fields of each prompt, by its place."""
    from hpu_duo.generation.offline import OfflineBatch

    prompts, params, places = [], list[Any](), []
    for place, item in enumerate(items):
        try:
            if item.problem is not None:
                raise item.problem
            params.append(_params({**sampling, **(item.sampling or {})}))
            text = item.prompt
            prompts.append(encode(tokenizer_of(loaded), text, is_chat) if isinstance(text, str) else text)
            places.append(place)
        except (TypeError, ValueError) as error:
            del params[len(places) :]
            results[place] = _fields(place, item, error=error)
    console = Console(stderr=True)
    columns = TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("prompts", total=len(items), completed=len(results))

        def put(result: OfflineResult) -> None:
            place = places[result.index]
            results[place] = _fields(place, items[place], result)
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
        "error": None if error is None else str(error),
    }
