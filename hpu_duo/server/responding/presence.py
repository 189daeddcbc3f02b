"""Callers who go away."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.types import Receive

_T = TypeVar("_T")


class CallerGoneError(Exception):
    """Nobody waits for the answer any more."""


@asynccontextmanager
async def watched(receive: Receive, gone: Callable[[], object]) -> AsyncIterator[None]:
    """Call a function when the caller goes away, for as long as the context lasts."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone()

    watcher = asyncio.create_task(wait())
    try:
        yield
    finally:
        watcher.cancel()


async def while_there(receive: Receive, work: Awaitable[_T]) -> _T:
    """Await something for a caller, and cancel it when the caller goes away.

    Raises:
        CallerGoneError: the caller has gone.
    """
    task, is_gone = asyncio.current_task(), False
    assert task is not None, "calls are answered by tasks"

    def gone() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    try:
        async with watched(receive, gone):
            return await work
    except asyncio.CancelledError:
        if not is_gone:
            raise
        if sys.version_info >= (3, 11):
            task.uncancel()
        raise CallerGoneError from None
