"""Answers as the OpenAI API writes them, whole or as events of a stream."""

from hpu_duo.server.answers.answer import Answer, AnswerHead
from hpu_duo.server.answers.chat import ChatAnswer
from hpu_duo.server.answers.choice import Choice
from hpu_duo.server.answers.completion import CompletionAnswer, EchoedPrompt
from hpu_duo.server.answers.events import DONE, KEEP_ALIVE, event
from hpu_duo.server.answers.usage import Usage

__all__ = [
    "DONE",
    "KEEP_ALIVE",
    "Answer",
    "AnswerHead",
    "ChatAnswer",
    "Choice",
    "CompletionAnswer",
    "EchoedPrompt",
    "Usage",
    "event",
]
