"""A call on its way to a replica of a front process, and the answer on its way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.responses import Response

from hpu_duo.replicas.answer import BrokenError, UnreachableError
from hpu_duo.replicas.events import AnswerCounts
from hpu_duo.replicas.prompts import RoutedCall
from hpu_duo.replicas.relaying import MOST_BREAKS, TURNED_AWAY, Caller, RelayedResponse, lost, passed_back
from hpu_duo.routing import Dispatch, NoReplicaError
from hpu_duo.server.protocol.errors import unavailable
from hpu_duo.server.responding import error_response

if TYPE_CHECKING:
    from hpu_duo.replicas.front import Front


class ForwardedResponse(RelayedResponse):
    """The answer of a replica of a front process.

    Args:
        front: has router and replicas.
        call: what the router goes by.
        method, path, body, headers: of the call.
    """

    def __init__(
        self, front: Front, call: RoutedCall, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        super().__init__(front.counts)
        self._front, self._call = front, call
        self._method, self._path, self._body, self._asked = method, path, body, headers

    async def _answer(self, caller: Caller) -> None:
        tried: list[str] = []
        refusal: Response = error_response(unavailable("no replica can serve now", 1))
        num_breaks = 0
        while num_breaks < MOST_BREAKS:
            try:
                replica = self._front.choose(self._call, tried)
            except NoReplicaError:
                break
            sent = self._front.dispatched(self._call, replica)
            tried.append(replica)
            try:
                refused = await self._attempt(sent, caller)
            except UnreachableError:
                self._counts.num_retries += 1
            except BrokenError:
                num_breaks += 1
                self._counts.num_broken += 1
                error = lost(replica)
                if caller.has_begun:
                    await caller.end_with(error)
                    return
                refusal = error_response(error)
                self._counts.num_retries += num_breaks < MOST_BREAKS
            else:
                if refused is None:
                    return
                refusal = refused
            finally:
                # Whatever has not been told to have finished has failed: an error, or nobody waits for it.
                self._front.router.failed(sent.request.request_id, self._front.now())
        await caller.refuse(refusal)

    async def _attempt(self, sent: Dispatch, caller: Caller) -> Response | None:
        """Answer by a replica; returns the refusal of one that does not take the call."""
        url = self._front.url(sent.replica) + self._path
        async with self._front.upstream.call(self._method, url, self._body, self._asked) as answer:
            if answer.status in TURNED_AWAY:
                return Response(await answer.body(), answer.status, passed_back(answer))
            self._counts.num_failed += await caller.pass_on(answer, _Account(self._front, sent))
        return None


class _Account:
    """Tells a front of one answer."""

    def __init__(self, front: Front, sent: Dispatch) -> None:
        self._front, self._sent = front, sent

    def answered(self) -> None:
        """See ``Told``."""
        self._front.answered(self._sent)

    def finished(self, counts: AnswerCounts) -> None:
        """See ``Told``."""
        self._front.finished(self._sent, counts)
