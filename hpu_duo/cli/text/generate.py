"""``hpu-duo generate``: continue prompts with any checkpoint, and documents that prompts go on behind."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hpu_duo.cli import options as opt
from hpu_duo.cli.options import (
    STDIN,
    decoded,
    encode,
    grouped,
    load_model,
    option_in,
    read_prompts,
    tokenizer_of,
)
from hpu_duo.cli.terminal import INTERRUPTED, user_errors
from hpu_duo.cli.text.offline import Item, read_items, run_offline
from hpu_duo.cli.text.run import LiveView, Run, RunReport, run_fields, run_table
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.context import PrefixContext
    from hpu_duo.engine.outputs import Completion
    from hpu_duo.llm import HPUDuoModel
    from hpu_duo.sampling import SamplingParams

_CHAT = "\u2026"
"""A message that no template changes."""


@dataclass(frozen=True)
class OpenedContext:
    """A document that a model keeps.

    Attributes:
        context: of the model.
        seconds: that it took to read or load it.
        is_loaded: whether its keys and values came from a file.
        after: text that a chat template writes behind a question.
    """

    context: PrefixContext
    seconds: float
    is_loaded: bool
    after: str = ""

    def prompt(self, question: str) -> list[int]:
        """Return the token ids of the document with a question behind it."""
        return self.context.prompt(question + self.after)

    def describe(self) -> str:
        """Say how long it is, and what it took."""
        verb = "loaded" if self.is_loaded else "read"
        return f"{len(self.context.token_ids):,} tokens, {verb} in {self.seconds:.2f} s"

    def fields(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "num_tokens": len(self.context.token_ids),
            "num_held_tokens": self.context.num_held_tokens,
            "is_loaded": self.is_loaded,
            "seconds": self.seconds,
        }


def check_context_options(context: str | None, save_context: Path | None, files: Sequence[str]) -> None:
    """Refuse options that do not go together, before a model is loaded.

    Raises:
        ValueError: there is nothing to save, the file cannot be written, or standard input is named twice.
    """
    if context == STDIN and STDIN in files:
        raise ValueError("expected standard input once, got --context - and --file -")
    if save_context is not None:
        if context is None:
            raise ValueError("expected --context with --save-context, got none")
        check_file("--save-context", save_context)


def open_context(model: HPUDuoModel, name: str, save_as: Path | None, *, is_chat: bool) -> OpenedContext:
    """Prefill a document, or load a saved context, and save it where ``save_as`` is given.

    Args:
        name: path of a text or of a saved context; ``-`` is standard input.
        is_chat: the document begins a user's message, and questions end it. A saved one begins it already.

    Raises:
        ValueError: the file cannot be read, or the document cannot be kept; see ``HPUDuoModel.prefill``.
    """
    from hpu_duo.context.record_file import is_context

    before, after = _around(tokenizer_of(model)) if is_chat else ("", "")
    is_loaded = name != STDIN and is_context(Path(name))
    text = "" if is_loaded else before + read_prompts([], [name])[0]
    began = time.perf_counter()
    context = model.load_context(name) if is_loaded else model.prefill(text, add_special_tokens=not is_chat)
    seconds = time.perf_counter() - began
    if save_as is not None:
        context.save(save_as)
    return OpenedContext(context, seconds, is_loaded, after)


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the texts that a chat template writes before a user's message and behind it."""
    if tokenizer.chat_template is None:
        raise ValueError("expected a tokenizer with a chat template for --chat, got one without")
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": _CHAT}], add_generation_prompt=True, tokenize=False
    )
    before, found, after = str(said).partition(_CHAT)
    if not found:
        raise ValueError("expected a chat template that keeps what the user says as it is, for --context")
    return before, after


_sampling_option = option_in("Sampling")


@grouped
def generate(
    *,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A prompt; repeat for several.")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="File with a prompt, - for standard input; repeat for several."),
    ] = None,
    model: opt.Model = None,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help=(
                "Document that all prompts follow, prefilled once: a text, - for standard input, or a "
                "file of --save-context."
            ),
        ),
    ] = None,
    save_context: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write what was read of the document, to be loaded next time."),
    ] = None,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help=(
                "For throughput: serve all prompts, write a line of JSON for each, and place weights by the "
                "search of plan-offload if the model does not fit."
            ),
        ),
    ] = False,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help=(
                "With --offline, file with a prompt on each line, or .jsonl with objects of prompt, id and "
                "sampling parameters; repeat for several."
            ),
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="PATH", help="With --offline, file to write results to.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap prompts in the model's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate for each prompt.")] = 128,
    as_json: opt.Json = False,
    seed: opt.Seed = 0,
    temperature: Annotated[float, _sampling_option("0 = the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, _sampling_option("Draw from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, _sampling_option("Draw from the likeliest tokens of this mass.")] = None,
    min_p: Annotated[
        float | None, _sampling_option("Drop tokens less likely than this times the likeliest.")
    ] = None,
    repetition_penalty: Annotated[float, _sampling_option("Above 1 discourages repetition.")] = 1.0,
    stop: Annotated[
        list[str] | None, _sampling_option("Text that ends the output; repeatable.", metavar="TEXT")
    ] = None,
    ignore_eos: Annotated[bool, _sampling_option("Continue after an end token.", "--ignore-eos")] = False,
    engine: opt.Engine,
) -> None:
    """Continue one prompt, streaming its text, or several of them in one batch.

    Text goes to standard output; progress and the closing table go to standard error.
    """
    with user_errors():
        if max_new_tokens < 1:
            raise ValueError(f"expected --max-new-tokens of 1 or more, got {max_new_tokens}")
        check_context_options(context, save_context, file or [])
        _check_offline(offline, prompts, output, others={"--context": context, "--json": as_json or None})
        needs_text = prompt or file or (save_context is None and not prompts)
        texts = read_prompts(prompt or [], file or []) if needs_text else []
        sampling = {
            "temperature": temperature,
            **_drawn(temperature, top_k=top_k, top_p=top_p, min_p=min_p),
            "repetition_penalty": repetition_penalty,
            "stop": tuple(decoded(text, "--stop") for text in stop or ()),
            "ignore_eos": ignore_eos,
            "max_tokens": max_new_tokens,
        }
        items = [*map(Item, texts), *read_items(prompts or [])] if offline else []
    if offline:
        run_offline(model, engine, items, sampling, output, is_chat=chat, seed=seed)
        return
    with user_errors():
        loaded = load_model(model, engine, max(1, len(texts)), seed)
        tokenizer, opened = tokenizer_of(loaded), None
        if context is None:
            ids = [encode(tokenizer, text, chat) for text in texts]
        else:
            opened = open_context(loaded, context, save_context, is_chat=chat)
            sampling["cache_salt"] = opened.context.cache_salt
            ids = [opened.prompt(text) for text in texts]
        hold = None if opened is None else opened.context.hold()
        run = Run(loaded.engine, ids, [_params(sampling)] * len(ids), hold)
    typer.echo(f"hpu-duo: {loaded.stats().resolved.computation}", err=True)
    console = Console(stderr=True)
    is_streamed = len(texts) == 1 and not as_json
    from graphs import GraphMissError, RecompileError

    with user_errors((RecompileError, GraphMissError)):
        report = run.finish(LiveView(console, sys.stdout if is_streamed else None))
    if as_json:
        fields = _fields(ids, report)
        typer.echo(json.dumps(fields if opened is None else fields | {"context": opened.fields()}, indent=2))
    else:
        if not is_streamed:
            _print_labelled(texts, report.completions)
        console.print()
        table = run_table(report)
        if opened is not None:
            table.add_row("context", opened.describe())
        console.print(table)
    if report.is_interrupted:
        raise typer.Exit(INTERRUPTED)


def _check_offline(
    offline: bool, prompts: Sequence[str] | None, output: Path | None, others: dict[str, object]
) -> None:
    """Raise ValueError for options that need --offline, and for those that do not go with it."""
    named = {"--prompts": prompts or None, "--output": output}
    for name, value in (others if offline else named).items():
        if value is not None:
            raise ValueError(f"expected {name} {'without' if offline else 'with'} --offline, got {value!r}")


def _drawn(temperature: float, **filters: float | None) -> dict[str, float]:
    """The filters that are set; without a temperature they would have no effect."""
    given = {name: value for name, value in filters.items() if value is not None}
    if given and temperature == 0.0:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"expected --temperature above 0 with {names}, got 0, which draws nothing")
    return given


def _params(sampling: dict[str, Any]) -> SamplingParams:
    from hpu_duo.sampling import SamplingParams

    return SamplingParams(**sampling)


def _print_labelled(prompts: Sequence[str], completions: Sequence[Completion]) -> None:
    for number, (text, completion) in enumerate(zip(prompts, completions), start=1):
        reason = completion.finish_reason or "interrupted"
        typer.echo(f"--- prompt {number} of {len(prompts)} ({reason}): {_shortened(text)}")
        typer.echo(completion.text)


def _shortened(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def _fields(ids: Sequence[Sequence[int]], report: RunReport) -> dict[str, Any]:
    completions = [
        {
            "num_prompt_tokens": len(prompt),
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": None if completion.finish_reason is None else str(completion.finish_reason),
            "stop_reason": completion.stop_reason,
            "num_cached_tokens": completion.num_cached_tokens,
        }
        for prompt, completion in zip(ids, report.completions)
    ]
    return {"completions": completions, "run": run_fields(report)}
