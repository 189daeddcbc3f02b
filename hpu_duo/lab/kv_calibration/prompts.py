"""Prompts that heads are calibrated on: those of a file, or documents of a haystack."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpu_duo.lab.eval.model_under_test import chat_text
from hpu_duo.lab.identify import DatasetSettings, Encoder, Form, PasskeyDataset
from hpu_duo.lab.tasks.haystack import BuiltinHaystack, TextHaystack


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        name: of the prompt, in messages.
        ids: int64 ``[T]``.
    """

    name: str
    ids: NDArray[np.int64]


@dataclass(frozen=True)
class PromptFile:
    """Prompts of a JSON Lines file: objects with the text under ``prompt``.

    Attributes:
        file: UTF-8 text; other keys of its objects are passed over.
        num_prompts: first ones to take; None for all.
        is_chat: whether texts are a user's messages, to be wrapped in the chat template.
    """

    file: Path
    num_prompts: int | None = None
    is_chat: bool = False

    def __post_init__(self) -> None:
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ValueError(f"expected 1 prompt or more, got {self.num_prompts}")

    def read(self, tokenizer: Any, max_positions: int | None) -> list[Prompt]:
        """Encode them.

        Raises:
            ValueError: the file cannot be read, has fewer prompts, or an entry is none; or the tokenizer has
                no chat template.
        """
        found = []
        for name, text in islice(self._texts(), self.num_prompts):
            # A template writes special tokens itself.
            ids = (
                tokenizer(chat_text(tokenizer, text), add_special_tokens=False)
                if self.is_chat
                else tokenizer(text)
            )["input_ids"]
            found.append(Prompt(name, np.array(ids, dtype=np.int64)))
        if len(found) < (self.num_prompts or 1):
            wanted = self.num_prompts or "one or more"
            raise ValueError(f"expected {wanted} prompts in {self.file}, got {len(found)}")
        return found

    def _texts(self) -> Iterator[tuple[str, str]]:
        try:
            lines = self.file.read_bytes().decode("utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"cannot read the prompts {self.file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"expected UTF-8 text in {self.file}, got byte {error.object[error.start]:#04x}"
            ) from error
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            name = f"line {number} of {self.file}"
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"expected a JSON object in {name}: {error}") from None
            text = entry.get("prompt") if isinstance(entry, dict) else None
            if not isinstance(text, str) or not text:
                raise ValueError(f'expected {{"prompt": TEXT}} in {name}, got {line.strip()[:80]!r}')
            yield name, text


@dataclass(frozen=True)
class Documents:
    """Documents of one length that hide passkeys and ask for them at their end, or plain text.

    Attributes:
        haystack: file of the filler text; None for the built-in text.
        num_prompts: documents.
        num_tokens: of each; questions and answers come on top.
        num_passkeys: that are hidden in each; 0 for plain text.
        passkey_words: of each passkey.
        form: the texts around passkeys.
        seed: any integer >= 0.
    """

    haystack: Path | None = None
    num_prompts: int = 16
    num_tokens: int = 4000
    num_passkeys: int = 10
    passkey_words: int = 32
    form: Form = Form.ORDINALS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts < 1 or self.num_tokens < 1 or self.num_passkeys < 0:
            raise ValueError(
                f"expected num_prompts >= 1, num_tokens >= 1 and num_passkeys >= 0, got {self.num_prompts}, "
                f"{self.num_tokens} and {self.num_passkeys}"
            )
        self._settings()

    def read(self, tokenizer: Any, max_positions: int | None) -> list[Prompt]:
        """Write them.

        Raises:
            ValueError: the haystack cannot be read or is too short, a document cannot hold its passkeys or is
                longer than the positions of the model, or the tokenizer cannot encode passkeys.
        """
        haystack = BuiltinHaystack() if self.haystack is None else TextHaystack.read(self.haystack)
        dataset = PasskeyDataset(self._settings(), haystack, Encoder(tokenizer))
        numbers = range(self.num_prompts)
        if self.num_passkeys:
            dataset.check(self.num_prompts, max_positions, ("--num-tokens",))
            ids = [dataset.sample(number).ids for number in numbers]
        else:
            dataset.check_filler(self.num_tokens, max_positions)
            ids = [dataset.filler(number, self.num_tokens) for number in numbers]
        return [Prompt(f"document {number}", each) for number, each in enumerate(ids)]

    def _settings(self) -> DatasetSettings:
        length = self.num_tokens
        # Plain text asks for no passkey, but its settings are of documents that could hold one.
        num_passkeys, words = (self.num_passkeys, self.passkey_words) if self.num_passkeys else (1, 1)
        return DatasetSettings(
            min_length=length,
            max_length=length,
            num_lengths=1,
            num_passkeys=num_passkeys,
            passkey_words=words,
            form=self.form,
            seed=self.seed,
        )


def check_lengths(prompts: Sequence[Prompt], shortest: int, max_positions: int | None) -> None:
    """Compare the tokens of prompts with those that are needed, and the positions of a model.

    Raises:
        ValueError: one is too short or too long.
    """
    for prompt in prompts:
        if len(prompt.ids) < shortest:
            raise ValueError(
                f"expected prompts of at least {shortest} tokens to measure, got {len(prompt.ids)} in "
                f"{prompt.name}"
            )
        if max_positions is not None and len(prompt.ids) > max_positions:
            raise ValueError(
                f"expected prompts of at most {max_positions} tokens, the positions of the model, got "
                f"{len(prompt.ids)} in {prompt.name}"
            )
