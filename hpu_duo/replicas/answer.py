"""The answer of a replica, however it comes: what its forwarding asks of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol


class UnreachableError(Exception):
    """A replica was not there: it has not seen the call."""


class BrokenError(Exception):
    """A connection ended before the answer did."""


class Answer(Protocol):
    """The beginning of an answer, and what is still to come."""

    @property
    def status(self) -> int:
        """Status of the response."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the response; names in lower case."""
        ...

    async def body(self) -> bytes:
        """All of the body.

        Raises:
            BrokenError: it did not end as it should.
        """
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """The body piece by piece; it is read no faster than pieces are taken.

        Raises:
            BrokenError: it did not end as it should.
        """
        ...
