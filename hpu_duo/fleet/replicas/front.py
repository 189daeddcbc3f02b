"""The front process: replicas, prompts read for the router before them, and shutdown."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from hpu_duo.fleet.replicas.relaying import (
    MOST_BREAKS,
    TURNED_AWAY,
    AnswerCounts,
    BrokenError,
    Caller,
    FrontCounts,
    RelayedResponse,
    UnreachableError,
    Upstream,
    add,
    has_run,
    lost,
    passed_back,
)
from hpu_duo.fleet.replicas.replica import Replica, ReplicaCommand, ReplicaState
from hpu_duo.fleet.routing import Dispatch, NoReplicaError, RoutedRequest, make_router
from hpu_duo.server.config import ServerConfig
from hpu_duo.server.http.auth import PREFIX_NAMESPACE
from hpu_duo.server.protocol import unavailable
from hpu_duo.server.responding import error_response
from hpu_duo.server.running.admission import NotServingError, Stage


@dataclass(frozen=True)
class FrontConfig:
    """Behaviour of a front process and its replicas.

    Attributes:
        server: of every replica; keys, limits of bodies, origins and the time to drain apply to the front as
            well.
        num_replicas: servers to run.
        router: name of the router, with options; see ``hpu_duo.fleet.routing.make_router``.
        load_timeout_s: seconds in which a replica has to have read its model; one that has not is killed and
            started again.

    Raises:
        ValueError: no replica, no such router, or no time to load.
    """

    server: ServerConfig
    num_replicas: int
    router: str = "e2"
    load_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"expected 1 replica or more, got {self.num_replicas}")
        make_router(self.router)
        if not self.load_timeout_s > 0:
            raise ValueError(f"expected load_timeout_s above 0, got {self.load_timeout_s}")


_SHORT = 16 * 2**10
"""Bodies of up to this number of bytes are parsed in the event loop: a thread would cost more."""
_MOST_CHARACTERS = 2**20
"""Most units of a prompt that routers compare: more would block the event loop."""


@dataclass(frozen=True)
class RoutedCall:
    """A call, as far as the front process reads it.

    Attributes:
        request: for the router.
        is_streamed: whether a stream is requested.
    """

    request: RoutedRequest
    is_streamed: bool


def read_call(call_id: str, body: bytes, key_name: str | None = None) -> RoutedCall:
    """Parse the data for routing: the prompt's characters, or its token ids if it has them.

    Messages are compared as the text of their JSON, so conversations that begin alike are alike. Of several
    prompts the first one counts. A body that is no JSON object has no prompt; the replica returns the error.

    Args:
        key_name: of the caller's API key, where callers with different ones share no prefix.
    """
    try:
        fields = from_json(body)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return RoutedCall(RoutedRequest.of_text(call_id, ""), False)
    user, salt = fields.get("user") or fields.get("safety_identifier"), fields.get("cache_salt")
    user = user if isinstance(user, str) else None
    salt = salt if isinstance(salt, str) else None
    namespace = salt if key_name is None else (key_name, salt)
    is_streamed = fields.get("stream") is True
    prompt: Any = fields.get("messages", fields.get("prompt"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str) and "messages" not in fields:
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(_is_token(each) for each in prompt):
        request = RoutedRequest.of_tokens(call_id, prompt, user, namespace)
    else:
        text = prompt if isinstance(prompt, str) else _text_of(fields, prompt)
        request = RoutedRequest.of_text(call_id, text[:_MOST_CHARACTERS], user, namespace)
    return RoutedCall(request, is_streamed)


async def read_beside(call_id: str, body: bytes, key_name: str | None = None) -> RoutedCall:
    """Parse a call by ``read_call``, a long one in a thread."""
    if len(body) <= _SHORT:
        return read_call(call_id, body, key_name)
    return await asyncio.to_thread(read_call, call_id, body, key_name)


def _text_of(fields: dict[str, Any], prompt: Any) -> str:
    """Messages as text, after the tools, as in templates."""
    tools = fields.get("tools")
    return "".join(to_json(each).decode() for each in (tools, prompt) if each)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


_log = logging.getLogger(__name__)

_OF_ONE_HOP = frozenset(
    (
        *("host", "connection", "content-length", "transfer-encoding", "keep-alive"),
        *("upgrade", "te", "trailer", "expect"),
    )
)
_MOST_STARTS = 5
"""Starts of every replica without one that was ready: more of them will not help."""
_END_S = 5.0
"""Seconds for a replica to exit, after the time to drain and to flush."""
_BACK_S = 5


class Front:
    """Sends calls to replicas; they live as long as it does.

    ``start``, ``stop`` and everything else is called in one event loop.

    Args:
        config: how to behave.
        commands: start the replicas, which are called ``0``, ``1`` and so on.

    Attributes:
        router: of ready replicas.
        replicas: by name.
        counts: of calls.
        upstream: connections to replicas.
    """

    def __init__(self, config: FrontConfig, commands: Sequence[ReplicaCommand]) -> None:
        self.config, self._commands = config, commands
        self.router = make_router(config.router)
        self.counts = FrontCounts()
        self.replicas: dict[str, Replica] = {}
        self._is_draining = False
        self._numbers = count()

    # Its life

    async def start(self) -> None:
        """Start the replicas; returns before they are ready."""
        self.upstream = Upstream(next(iter(self.config.server.metrics_api_keys), None))
        for number, command in enumerate(self._commands):
            name = str(number)
            self.replicas[name] = Replica(
                name, command, self.upstream, self._joined, self._left, self.config.load_timeout_s
            )
            self.replicas[name].start()

    async def stop(self) -> None:
        """End the replicas, and all connections to them."""
        self._is_draining = True
        await asyncio.gather(*(each.stop(_END_S) for each in self.replicas.values()))
        await self.upstream.close()

    async def drain(self) -> bool:
        """Reject new calls, and drain and stop the replicas.

        Returns:
            Whether all running calls have completed.
        """
        self._is_draining = True
        counts = self.counts
        num_cut = counts.num_broken + counts.num_failed
        config = self.config.server
        grace_s = config.drain_seconds + config.flush_seconds + _END_S
        await asyncio.gather(*(each.stop(grace_s) for each in self.replicas.values()))
        return counts.num_broken + counts.num_failed == num_cut

    @property
    def stage(self) -> Stage:
        """The stage of its life: ready as long as any replica is."""
        if self._is_draining:
            return Stage.DRAINING
        if self.router.replicas:
            return Stage.READY
        return Stage.FAILED if self._is_hopeless else Stage.WARMING_UP

    @property
    def _is_hopeless(self) -> bool:
        """Whether replicas end as often as they are started, or were started with a wrong command."""
        known = list(self.replicas.values())
        if not known or any(each.was_ready for each in known):
            return False
        return any(each.is_refused for each in known) or all(
            each.num_restarts >= _MOST_STARTS for each in known
        )

    def _joined(self, replica: Replica) -> None:
        if not self._is_draining:
            self.router.join(replica.name, self.now())

    def _left(self, replica: Replica) -> None:
        if replica.name in self.router.replicas:
            self.router.leave(replica.name, self.now())

    # Calls

    def now(self) -> float:
        """The router's clock."""
        return time.monotonic()

    def url(self, replica: str) -> str:
        """Address of a replica."""
        return self.replicas[replica].url

    async def answer(self, request: Request) -> Response:
        """Serve a call.

        Raises:
            NotServingError: the front process is about to end.
            ApiError: no replica is ready.
        """
        if self.stage is Stage.DRAINING:
            raise NotServingError(Stage.DRAINING)
        if not self.router.replicas:
            raise unavailable("no replica is ready", _BACK_S)
        body = await request.body()
        asked, namespace = body if request.method == "POST" else b"", request.scope.get(PREFIX_NAMESPACE)
        call = await read_beside(str(next(self._numbers)), asked, namespace)
        headers = {name: value for name, value in request.headers.items() if name not in _OF_ONE_HOP}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return ForwardedResponse(self, call, request.method, path, body, headers)

    def choose(self, call: RoutedCall, tried: Collection[str]) -> str:
        """Choose a replica; NoReplicaError if there is none but those that were tried."""
        return self.router.choose(call.request, self.now(), tried)

    def dispatched(self, call: RoutedCall, replica: str) -> Dispatch:
        """Called when a call is sent to a replica."""
        sent = self.router.dispatched(call.request, replica, self.now())
        self.counts.requests[replica] += 1
        add(self.counts.prompt_tokens, replica, call.request.num_tokens)
        add(self.counts.expected_tokens, replica, sent.num_expected * call.request.tokens_per_unit)
        return sent

    def answered(self, sent: Dispatch) -> None:
        """Called at the start of a response."""
        self.router.first_token(sent.request.request_id, self.now())

    def finished(self, sent: Dispatch, counts: AnswerCounts) -> None:
        """Called at the end of a complete response."""
        cached = None
        if counts.num_cached_share is not None:
            cached = counts.num_cached_share * sent.request.num_tokens
            add(self.counts.cached_tokens, sent.replica, cached)
        self.router.finished(sent.request.request_id, self.now(), counts.num_outputs, cached)

    @property
    def num_ready(self) -> int:
        """Replicas that are sent calls."""
        return sum(each.state is ReplicaState.READY for each in self.replicas.values())


class ForwardedResponse(RelayedResponse):
    """The response of a replica of a front process.

    Args:
        front: has router and replicas.
        call: data for routing.
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
                # An unfinished call has failed: an error, or the caller disconnected.
                self._front.router.failed(sent.request.request_id, self._front.now())
        await caller.refuse(refusal)

    async def _attempt(self, sent: Dispatch, caller: Caller) -> Response | None:
        """Respond by a replica; returns the rejection of one that is full."""
        url = self._front.url(sent.replica) + self._path
        async with self._front.upstream.call(self._method, url, self._body, self._asked) as answer:
            if answer.status in TURNED_AWAY:
                refusal = Response(await answer.body(), answer.status, passed_back(answer))
                if not has_run(refusal):
                    return refusal
                await caller.refuse(refusal)
                return None
            self._counts.num_failed += await caller.pass_on(answer, _Account(self._front, sent))
        return None


class _Account:
    """Reports the progress of one response to a front."""

    def __init__(self, front: Front, sent: Dispatch) -> None:
        self._front, self._sent = front, sent

    def answered(self) -> None:
        """See ``Told``."""
        self._front.answered(self._sent)

    def finished(self, counts: AnswerCounts) -> None:
        """See ``Told``."""
        self._front.finished(self._sent, counts)
