"""Documents of the command line, read or loaded before the prompts that ask about them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpu_duo.cli.arguments.values import STDIN, read_prompts, tokenizer_of
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.context import PrefixContext
    from hpu_duo.llm import HPUDuoModel

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
    """Read a document, or load what was saved of one, and save it if that is asked for.

    Args:
        name: path of a text or of a saved context; ``-`` is standard input.
        is_chat: the document begins a user's message, and questions end it. A saved one begins it already.

    Raises:
        ValueError: the file cannot be read, or the document cannot be kept; see ``HPUDuoModel.prefill``.
    """
    from hpu_duo.context.saved import is_context

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
