"""Reasons why a stream of outputs ends before its requests have."""

from __future__ import annotations


class RequestFailedError(Exception):
    """An error ended a request that had been accepted; it is the ``__cause__``."""


class SlowReaderError(Exception):
    """A stream was read so much slower than it was written that its requests were aborted."""


class AnswerTooLargeError(Exception):
    """The outputs of a call take more memory than they may."""


class AnswerMemoryFullError(Exception):
    """The outputs of all calls together take as much memory as they may."""


class EngineDiedError(Exception):
    """The engine's thread has ended, and nothing will be served any more."""
