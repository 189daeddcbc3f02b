"""Encoding of texts and messages, decoding of token ids."""

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
    """The chat template rejects the messages, or there is no template.

    Attributes:
        field: the invalid field of the call.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Chat:
    """A conversation, and how to render it.

    Attributes:
        messages: in the format of transformers' chat templates: contents are text, arguments of tool calls
            are objects.
        tools: functions that the model may call, in the form of the OpenAI API; None = none.
        documents: texts that the template may show; None = none.
        add_generation_prompt: end with the beginning of the assistant's turn.
        continue_final_message: do not end the last message, so that the model continues it.
        variables: further variables of the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class TemplateChoice:
    """The chat template of a server: a custom one, or that of the checkpoint.

    Args:
        tokenizer: of the checkpoint.
        given: the source of a template that replaces the checkpoint's.
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
        """All templates of the tokenizer as one text; None without any."""
        template: Any = self._given or self._tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def render(self, chat: Chat) -> str:
        """The text of a conversation, special tokens included.

        Raises:
            ChatTemplateError: there is no template, or it rejects the conversation.
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
            # A template is a program with the caller's input, so any error may be the caller's.
            raise ChatTemplateError(
                "messages", f"the chat template rejects these messages: {error}"
            ) from error
        return str(text)


_T = TypeVar("_T")

Side = Literal["left", "right"]
"""The side on which a prompt is truncated: left keeps its last tokens."""

_NUM_THREADS = 4
_SHORT = 2048
"""Texts of up to this number of characters are encoded in the event loop: a thread would cost more."""


_SPARE = 4
"""Of a truncated text, this multiple of the longest text that can fit is encoded: tokens may change at the
cut, which is then far from those that remain."""


class TextTooLongError(ValueError):
    """A text is too long, however it is tokenized.

    Attributes:
        num_characters, most: of the text, and the limit.
    """

    def __init__(self, num_characters: int, most: int) -> None:
        super().__init__(f"expected at most {most:,} characters, got {num_characters:,}")
        self.num_characters, self.most = num_characters, most


class PromptEncoder:
    """Encodes texts and conversations, long ones in threads.

    Cancelling a method that has not begun drops its text.

    Args:
        tokenizer: of the checkpoint; it is copied, since the engine decodes with it concurrently.
        max_tokens: most tokens of a text.
        chat_template: source of a template that replaces the checkpoint's.

    Attributes:
        max_characters: most characters of a text, by the longest token of the vocabulary.
        num_at_once: most characters of texts that are encoded without a thread; may be changed.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_tokens: int, chat_template: str | None = None
    ) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        # The first call sets truncation and padding, which is not thread-safe.
        self.tokenizer("")
        # A token's name has at least as many characters as its text.
        self.max_characters = max_tokens * max(map(len, self.tokenizer.get_vocab()), default=1)
        self.num_at_once = _SHORT
        self.template = TemplateChoice(self.tokenizer, chat_template)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hpu-duo-encode")

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, truncation_side: Side | None = None
    ) -> list[int]:
        """Token ids of a text.

        Args:
            truncation_side: side on which the caller truncates, so that a long text is no error, and is
                encoded in part; None = no truncation.

        Raises:
            TextTooLongError: it is too long.
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
        """Token ids of a conversation, rendered by the chat template.

        Args:
            make_chat: called in the encoding thread; its errors are raised here.
            num_bytes: approximate size of the conversation.
            truncation_side: see ``encode``.

        Raises:
            ChatTemplateError: the template rejects it.
            TextTooLongError: it is too long.
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
        """Decode tokens, special ones included."""

        def found() -> str:
            return str(
                self.tokenizer.decode(
                    list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            )

        return await self._soon(found, len(token_ids))

    def close(self) -> None:
        """Stop the threads."""
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

    A token that is only a part of a character has no text, and is named by its bytes, ``bytes:\\xe2\\x82``.

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
        """Number of characters of a text that begin with a token.

        Args:
            has_special: whether special tokens are part of the text.
        """
        if not has_special and token_id in self._special_ids:
            return 0
        # After its first byte, a character's bytes in UTF-8 are 10xxxxxx.
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
        """The bytes of a token."""
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
    """The characters of bytes in byte-level vocabularies.

    Source: Radford et al. 2019 (GPT-2): printable bytes are their own characters, the others, in order, those
    from 256 on.
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
