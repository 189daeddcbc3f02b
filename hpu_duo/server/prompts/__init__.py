"""From texts and messages to token ids, and from token ids to texts and bytes."""

from hpu_duo.server.prompts.chat import Chat, ChatTemplateError, TemplateChoice
from hpu_duo.server.prompts.encoder import PromptEncoder, TextTooLongError
from hpu_duo.server.prompts.token_texts import TokenTexts

__all__ = ["Chat", "ChatTemplateError", "PromptEncoder", "TemplateChoice", "TextTooLongError", "TokenTexts"]
