"""From texts and messages to token ids, and from token ids to texts and bytes."""

from __future__ import annotations

import asyncio
import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hpu_duo.sampling.detokenizer import REPLACEMENT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatTemplateError(ValueError):
    """Messages that a chat template does not take, or no template to take them.

    Attributes:
        field: what of the call is at fault.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Chat:
    """A conversation, and how to render it.

    Attributes:
        messages: as transformers' chat templates take them: contents are text, arguments of tool calls are
            objects.
        tools: functions that the model may call, in the form of the OpenAI API; None = none.
        documents: texts that the template may show; None = none.
        add_generation_prompt: end with the beginning of the assistant's turn.
        continue_final_message: leave the last message open, for the model to continue it.
        variables: further variables of the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class TemplateChoice:
    """The template of a server: one that was given, or that of the checkpoint.

    Args:
        tokenizer: of the checkpoint.
        given: the source of a template to take in place of the checkpoint's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, given: str | None = None) -> None:
        self._tokenizer, self._given = tokenizer, given
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {
            "messages",
            "tools",
            "documents",
        }

    @property
    def source(self) -> str | None:
        """Every template there is, as one text; None without any."""
        template: Any = self._given or self._tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def render(self, chat: Chat) -> str:
        """The text of a conversation, special tokens included.

        Raises:
            ChatTemplateError: there is no template, or it does not take the conversation.
        """
        if self.source is None:
            raise ChatTemplateError("messages", "the model has no chat template; use /v1/completions")
        if taken := sorted(self._reserved & set(chat.variables)):
            raise ChatTemplateError(
                "chat_template_kwargs", f"expected variables of the chat template, got {', '.join(taken)}"
            )
        if chat.add_generation_prompt and chat.continue_final_message:
            raise ChatTemplateError(
                "continue_final_message", "expected add_generation_prompt=false with continue_final_message"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in chat.messages],
                tools=None if chat.tools is None else [dict(tool) for tool in chat.tools],
                documents=None if chat.documents is None else [dict(one) for one in chat.documents],
                chat_template=self._given,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tokenize=False,
                **chat.variables,
            )
        except Exception as error:
            # A template is a program that sees what the caller wrote, so any error may be the caller's.
            raise ChatTemplateError(
                "messages", f"the chat template does not take these messages: {error}"
            ) from error
        return str(text)


_T = TypeVar("_T")

Side = Literal["left", "right"]
"""The side on which a prompt is cut: left keeps its last tokens."""

_NUM_THREADS = 4
_SHORT = 2048
"""Texts of up to so many characters are encoded at once: a thread would take longer to be asked."""


_SPARE = 4
"""Of a text that is truncated, so many times the longest that can fit is encoded: tokens may change
where a text is cut, and those that are wanted are far from there."""


class TextTooLongError(ValueError):
    """A text has more characters than the longest tokens could stand for.

    Attributes:
        num_characters, most: of the text, and those it may have.
    """

    def __init__(self, num_characters: int, most: int) -> None:
        super().__init__(f"expected at most {most:,} characters, got {num_characters:,}")
        self.num_characters, self.most = num_characters, most


class PromptEncoder:
    """Encodes texts and conversations, long ones in threads.

    Callers who no longer wait are not worked for: to cancel a method that has not begun drops its text.

    Args:
        tokenizer: of the checkpoint; a copy is made, since the engine decodes with it at the same time.
        max_tokens: most tokens that a text may have.
        chat_template: source of a template to take in place of the checkpoint's.

    Attributes:
        max_characters: of a text, since none of its tokens is longer than the longest of the vocabulary.
        num_at_once: characters of texts that are encoded at once, without a thread; may be changed.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_tokens: int, chat_template: str | None = None
    ) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        # The first call settles truncation and padding, which threads could not change together.
        self.tokenizer("")
        # Characters of a token's name are characters or bytes of a text, or more than those.
        self.max_characters = max_tokens * max(map(len, self.tokenizer.get_vocab()), default=1)
        self.num_at_once = _SHORT
        self.template = TemplateChoice(self.tokenizer, chat_template)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hpu-duo-encode")

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, truncation_side: Side | None = None
    ) -> list[int]:
        """Token ids of a text.

        Args:
            truncation_side: where the caller cuts tokens, so that a long text is no error, and encoded in
                part; None for nowhere.

        Raises:
            TextTooLongError: it cannot fit.
        """
        fitting = self._fitting(text, truncation_side)
        return await self._soon(lambda: self._ids(fitting, add_special_tokens), len(fitting))

    async def encode_chat(
        self,
        make_chat: Callable[[], Chat],
        num_bytes: int,
        *,
        add_special_tokens: bool = False,
        truncation_side: Side | None = None,
    ) -> list[int]:
        """Token ids of a conversation, as the chat template writes it.

        Args:
            make_chat: called where it is encoded; its errors are raised here.
            num_bytes: of the conversation, about.
            truncation_side: see ``encode``.

        Raises:
            ChatTemplateError: the template does not take it.
            TextTooLongError: it cannot fit.
        """

        def found() -> list[int]:
            text = self.template.render(make_chat())
            return self._ids(self._fitting(text, truncation_side), add_special_tokens)

        return await self._soon(found, num_bytes)

    async def names(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's names of tokens."""
        ids = list(token_ids)
        return await self._soon(lambda: list(self.tokenizer.convert_ids_to_tokens(ids)), len(ids))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""

        def found() -> str:
            return str(
                self.tokenizer.decode(
                    list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            )

        return await self._soon(found, len(token_ids))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _fitting(self, text: str, truncation_side: Side | None) -> str:
        if truncation_side is not None:
            most = _SPARE * self.max_characters
            return text[-most:] if truncation_side == "left" else text[:most]
        if len(text) > self.max_characters:
            raise TextTooLongError(len(text), self.max_characters)
        return text

    async def _soon(self, work: Callable[[], _T], length: int) -> _T:
        if length <= self.num_at_once:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Texts and bytes of the tokens of one vocabulary.

    A token that is only a part of a character has no text: it is called by its bytes, ``bytes:\\xe2\\x82``.

    Args:
        tokenizer: of the checkpoint.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_tokens)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = backend is not None and "ByteLevel" in repr(backend.decoder)
        self.text = lru_cache(1 << 16)(self._text)
        self.bytes = lru_cache(1 << 16)(self._bytes)

    def num_characters(self, token_id: int, *, has_special: bool) -> int:
        """Characters of a text that begin with a token.

        Args:
            has_special: whether special tokens are a part of the text.
        """
        if not has_special and token_id in self._special_ids:
            return 0
        # Behind its first byte, a character's bytes in UTF-8 are 10xxxxxx.
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes(token_id))

    def _text(self, token_id: int) -> str:
        """The text of a token alone."""
        text = str(
            self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        if REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token_id))

    def _bytes(self, token_id: int) -> tuple[int, ...]:
        """The bytes that a token stands for."""
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(name, str) and name not in self._special:
            if self._is_byte_level and all(character in _BYTE_OF for character in name):
                return tuple(_BYTE_OF[character] for character in name)
            if match := _BYTE.fullmatch(name):
                return (int(match[1], 16),)
        text = self._tokenizer.decode(
            [token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return tuple(str(text).encode())


def _byte_level_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes.

    Source: Radford et al. 2019 (GPT-2): printable bytes stand for themselves, the others, in order, for the
    characters from 256 on.
    """
    plain = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("\N{INVERTED EXCLAMATION MARK}"), 0xAD),
        *range(0xAE, 256),
    ]
    alphabet = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()

__all__ = ["Chat", "ChatTemplateError", "PromptEncoder", "TemplateChoice", "TextTooLongError", "TokenTexts"]
