"""A call on its way from the ingress to an engine, and the answer on its way back."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response

from hpu_duo.ray_serve.exchange import EngineCall, Head
from hpu_duo.ray_serve.shared_router import SharedRouter, Ticket
from hpu_duo.replicas.answer import BrokenError
from hpu_duo.replicas.counts import FrontCounts
from hpu_duo.replicas.prompts import RoutedCall
from hpu_duo.replicas.relaying import MOST_BREAKS, TURNED_AWAY, Caller, RelayedResponse, lost, passed_back
from hpu_duo.server.protocol.errors import too_busy, unavailable
from hpu_duo.server.responding import error_response

_log = logging.getLogger(__name__)

_RETRY_S = 1


@dataclass(frozen=True)
class HandleAnswer:
    """The beginning of an answer that comes through a handle; see ``Answer``.

    Attributes:
        status, headers: of the response; names in lower case.
    """

    status: int
    headers: Mapping[str, str]
    _rest: AsyncIterator[bytes]

    async def body(self) -> bytes:
        """All of the body; see ``Answer``."""
        return b"".join([piece async for piece in self._rest])

    def pieces(self) -> AsyncIterator[bytes]:
        """The body piece by piece; see ``Answer``."""
        return self._rest


class Engines:
    """The replicas, as the ingress calls them.

    Args:
        handle: of the deployment of ``Engine``.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._answers = handle.options(method_name="answer", stream=True)

    @asynccontextmanager
    async def call(self, ticket: Ticket, call: EngineCall) -> AsyncIterator[HandleAnswer]:
        """Call a replica; leaving the context before the answer has ended tells it that nobody waits.

        Raises:
            BackPressureError: too many calls wait for a replica.
            BrokenError: the replica was lost before an answer began; later, reading raises it.
        """
        answer: Any = self._answers.remote(ticket, call)
        is_ended = False

        async def told() -> AsyncGenerator[Any, None]:
            nonlocal is_ended
            try:
                async for piece in answer:
                    yield piece
            except BackPressureError:
                raise
            except (RayError, RayServeException) as error:
                _log.warning("replica %s has not answered: %s", ticket.replica, type(error).__name__)
                raise BrokenError(str(error)) from error
            is_ended = True

        async with aclosing(told()) as pieces:
            try:
                head: Head = await anext(pieces)
                yield HandleAnswer(head.status, head.headers, pieces)
            except StopAsyncIteration:
                raise BrokenError("the replica has ended its answer before it began") from None
            finally:
                if not is_ended:
                    answer.cancel()


class EngineResponse(RelayedResponse):
    """The answer of an engine to a call.

    Args:
        engines: to call.
        counts: of calls.
        routed: what routing goes by.
        call: as it is passed on.
    """

    def __init__(self, engines: Engines, counts: FrontCounts, routed: RoutedCall, call: EngineCall) -> None:
        super().__init__(counts)
        self._engines, self._routed, self._call = engines, routed, call

    async def _answer(self, caller: Caller) -> None:
        tried: list[str] = []
        num_breaks = 0
        while True:
            ticket = Ticket(self._routed, tuple(tried))
            try:
                refusal = await self._attempt(ticket, caller)
            except BackPressureError:
                error = too_busy("the queue before the replicas is full", _RETRY_S)
                refusal = error_response(error)
                break
            except BrokenError:
                num_breaks += 1
                self._counts.num_broken += 1
                error = lost(ticket.replica or "that was chosen")
                if caller.has_begun:
                    await caller.end_with(error)
                    return
                refusal = error_response(error)
            finally:
                ticket.end()
            if refusal is None:
                return
            if ticket.replica is not None:
                tried.append(ticket.replica)
            if num_breaks == MOST_BREAKS or not _has_another(ticket.router, tried):
                break
            self._counts.num_retries += 1
        await caller.refuse(refusal)

    async def _attempt(self, ticket: Ticket, caller: Caller) -> Response | None:
        """Answer by a replica; returns the refusal of one that does not take the call."""
        async with self._engines.call(ticket, self._call) as answer:
            if answer.status in TURNED_AWAY:
                return Response(await answer.body(), answer.status, passed_back(answer))
            self._counts.num_failed += await caller.pass_on(answer, ticket)
        return None


def _has_another(router: SharedRouter | None, tried: list[str]) -> bool:
    return router is not None and not set(router.replicas).issubset(tried)


def nobody_ready() -> Response:
    """The refusal of an ingress that knows of no replica."""
    return error_response(unavailable("no replica is ready", 5))
