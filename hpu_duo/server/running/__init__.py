"""An engine in a thread of its own, and its asynchronous interface."""

from hpu_duo.server.running.admission import (
    AnswerMemoryFullError,
    AnswerTooLargeError,
    EngineDiedError,
    RequestFailedError,
    SlowReaderError,
    Submission,
)
from hpu_duo.server.running.async_engine import AsyncEngine, EngineThread
from hpu_duo.server.running.stream import AnswerMemory, ChoiceOutput, Holding, OutputStream

__all__ = [
    "AnswerMemory",
    "AnswerMemoryFullError",
    "AnswerTooLargeError",
    "AsyncEngine",
    "ChoiceOutput",
    "EngineDiedError",
    "EngineThread",
    "Holding",
    "OutputStream",
    "RequestFailedError",
    "SlowReaderError",
    "Submission",
]
