"""Token ids of prompts, found beside the event loop."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from hpu_duo.server.prompts.chat import Chat, TemplateChoice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_T = TypeVar("_T")

_NUM_THREADS = 4
_SHORT = 2048
"""Texts of up to so many characters are encoded at once: a thread would take longer to be asked."""


class PromptEncoder:
    """Encodes texts and conversations, long ones in threads.

    Args:
        tokenizer: of the checkpoint; a copy is made, since the engine decodes with it at the same time.
        chat_template: source of a template to take in place of the checkpoint's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        # The first call settles truncation and padding, which threads could not change together.
        self.tokenizer("")
        self.template = TemplateChoice(self.tokenizer, chat_template)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hpu-duo-encode")

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

        def found() -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

        return await self._soon(found, len(text))

    async def encode_chat(self, chat: Chat, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a conversation, as the chat template writes it.

        Raises:
            ChatTemplateError: the template does not take it.
        """

        def found() -> list[int]:
            text = self.template.render(chat)
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

        return await self._soon(found, _SHORT + 1)

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

    async def _soon(self, work: Callable[[], _T], length: int) -> _T:
        if length <= _SHORT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
