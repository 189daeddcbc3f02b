"""Prompts from the command line and from files, and their token ids."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.llm import HPUDuoModel

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
