"""An engine in a thread of its own, and what an event loop sees of it."""

from hpu_duo.server.running.async_engine import AsyncEngine
from hpu_duo.server.running.engine_thread import EngineThread
from hpu_duo.server.running.failures import (
    AnswerMemoryFullError,
    AnswerTooLargeError,
    EngineDiedError,
    RequestFailedError,
    SlowReaderError,
)
from hpu_duo.server.running.holding import AnswerMemory, Holding
from hpu_duo.server.running.stream import ChoiceOutput, OutputStream
from hpu_duo.server.running.submission import Submission

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
