"""Responses of the OpenAI API, whole or as events of a stream."""

from hpu_duo.server.answers.answer import DONE, KEEP_ALIVE, Answer, AnswerHead, Choice, Usage, event
from hpu_duo.server.answers.chat import ChatAnswer, CompletionAnswer, EchoedPrompt

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
