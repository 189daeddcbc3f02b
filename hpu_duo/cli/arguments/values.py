"""Values of options: models, paths, prompts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from hpu_duo.cli.terminal.errors import user_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.llm import HPUDuoModel


def model_option(help: str, *, needs_weights: bool = True, **options: Any) -> Any:
    """Make the option of a command that takes a model; an id arrives as the directory of its files.

    Args:
        needs_weights: False where config.json is enough.
        options: of ``typer.Option``.
    """

    def find(given: Path | None) -> Path | None:
        # What is no id is for the command to refuse, after what it checks first.
        if given is None or given.is_absolute() or given.exists():
            return given
        # Slow to import, and only ids need it.
        from hpu_duo.modeling.hub import find_checkpoint, is_id, split_revision

        name, revision = split_revision(str(given))
        if not is_id(name):
            return given
        with user_errors():
            return find_checkpoint(name, revision, needs_weights=needs_weights)

    return typer.Option(
        parser=_path,
        callback=find,
        metavar="DIR|ID",
        help=f"{help} Or ORG/NAME[@REVISION] on the hub.",
        **options,
    )


def _path(text: str | Path) -> Path:
    # An empty path would be the current directory.
    with user_errors():
        if not str(text):
            raise ValueError("expected a directory or the id of a model, got ''")
    return Path(text)


def path(text: str | Path) -> Path:
    """Read a path; raises ``typer.BadParameter`` for an empty one, which pathlib takes for ``.``."""
    if not str(text):
        raise typer.BadParameter("expected a path, got ''")
    return Path(text)


def refuse_empty_paths(app: typer.Typer) -> None:
    """Read every path of every command of ``app``, those of its groups too, by ``path``."""
    for command in app.registered_commands:
        callback: Any = command.callback
        evaluated = signature(callback, eval_str=True)
        for parameter in evaluated.parameters.values():
            _read_by_path(parameter.annotation)
        # Once evaluated, annotations are the objects that have been changed.
        callback.__signature__ = evaluated
        callback.__annotations__ = {each.name: each.annotation for each in evaluated.parameters.values()}
    for group in app.registered_groups:
        if group.typer_instance is not None:
            refuse_empty_paths(group.typer_instance)


def _read_by_path(annotation: Any) -> None:
    if get_origin(annotation) is Annotated:
        kind, *notes = get_args(annotation)
        for note in notes:
            if _has_paths(kind) and hasattr(note, "parser"):
                note.parser = path


def _has_paths(kind: Any) -> bool:
    return kind is Path or any(map(_has_paths, get_args(kind)))


STDIN = "-"


def read_prompts(texts: Sequence[str], files: Sequence[str]) -> list[str]:
    """The texts, then the contents of the files, in the order given.

    Args:
        files: paths of UTF-8 texts; ``-`` is standard input.

    Raises:
        ValueError: there is none, one is empty, a file cannot be read, or standard input is named twice.
    """
    if list(files).count(STDIN) > 1:
        raise ValueError("expected standard input (--file -) at most once")
    named = [
        (decoded(text, f"prompt {number}"), f"prompt {number}") for number, text in enumerate(texts, start=1)
    ]
    named += [(_read(name), f"the prompt file {name!r}") for name in files]
    if not named:
        raise ValueError("expected a prompt: --prompt TEXT, --file PATH, or --file - for standard input")
    for text, name in named:
        if not text:
            raise ValueError(f"expected text in {name}, got none")
    return [text for text, _ in named]


def decoded(text: str, name: str) -> str:
    """Decode a text of the command line as UTF-8, whatever the locale is.

    Args:
        name: name of the text, for the message.

    Raises:
        ValueError: its bytes are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        # Bytes that the locale does not have arrive as surrogates.
        return _utf8(os.fsencode(text), name)
    return text


def _utf8(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8 text in {name}, got byte {data[error.start]:#04x}") from None


def _read(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the prompt file {name!r}: {error.strerror}") from error
    return _utf8(data, repr(name))


def tokenizer_of(model: HPUDuoModel) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer.

    Raises:
        ValueError: it has none, so text can be neither read nor written.
    """
    if model.tokenizer is None:
        raise ValueError(
            f"expected a tokenizer beside the model in {model.engine_config.model.path}, found none"
        )
    return model.tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: str, is_chat: bool = False) -> list[int]:
    """Token ids of a prompt, with the special tokens that the tokenizer or its chat template adds.

    Args:
        is_chat: take the text as the user's message, and let the assistant answer.

    Raises:
        ValueError: a chat is wanted and the tokenizer has no chat template.
    """
    if not is_chat:
        return list(tokenizer(text)["input_ids"])
    if tokenizer.chat_template is None:
        raise ValueError("expected a tokenizer with a chat template for --chat, got one without")
    # As text first: what apply_chat_template returns for ids differs between transformers 4 and 5.
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(said, add_special_tokens=False)["input_ids"])
