"""Token ids of prompts, found beside the event loop."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, TypeVar

from hpu_duo.server.prompts.chat import Chat, TemplateChoice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
