"""Messages as the text that a model was trained on, by the chat template of its checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
