"""Calls of an application without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hpu_duo.fleet.ray_serve.engine import EngineCall, Head, below_prefix, exchange


class App:
    """Answers in several ways, and notes what becomes of it."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        routes = [
            Route("/echo/{name}", self.echo, methods=["GET", "POST"]),
            Route("/stream", self.stream),
            Route("/break", self.cut),
            Route("/fail", self.fail),
        ]
        self.asgi = Starlette(routes=routes)

    async def echo(self, request: Request) -> Response:
        """All that is told of the call."""
        fields = {
            "name": request.path_params["name"],
            "query": request.url.query,
            "header": request.headers["x-one"],
            "body": (await request.body()).decode(),
        }
        return JSONResponse(fields, 201, {"X-Two": "2"})

    async def stream(self, request: Request) -> Response:
        """Pieces without an end."""

        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"piece "
                    await asyncio.sleep(0)
            finally:
                self.notes.append("left")

        return StreamingResponse(pieces())

    async def cut(self, request: Request) -> Response:
        """The beginning of an answer."""

        async def pieces() -> AsyncIterator[bytes]:
            yield b"piece"
            raise KeyError("the cause")

        return StreamingResponse(pieces())

    async def fail(self, request: Request) -> Response:
        """Nothing."""
        raise KeyError("the cause")


def test_a_call_arrives_as_it_was_sent_and_its_answer_comes_back_whole() -> None:
    call = EngineCall("POST", "/echo/a%20b", "x=%201", {"X-One": "1"}, b"the body")

    async def pieces() -> list[Head | bytes]:
        return [piece async for piece in exchange(App().asgi, call)]

    head, body = asyncio.run(pieces())
    assert isinstance(head, Head)
    assert (head.status, head.headers["x-two"]) == (201, "2")
    assert body == b'{"name":"a b","query":"x=%201","header":"1","body":"the body"}'


def test_whoever_stops_listening_ends_the_call() -> None:
    app = App()

    async def some() -> None:
        pieces = exchange(app.asgi, EngineCall("GET", "/stream"))
        assert isinstance(await anext(pieces), Head)
        assert await anext(pieces) == b"piece "
        await pieces.aclose()

    asyncio.run(asyncio.wait_for(some(), 60))
    assert app.notes == ["left"]


def test_an_answer_that_breaks_off_is_not_taken_for_a_complete_one() -> None:
    found: list[Head | bytes] = []

    async def pieces() -> None:
        async for piece in exchange(App().asgi, EngineCall("GET", "/break")):
            found.append(piece)

    with pytest.raises(RuntimeError, match="ended before its response") as error:
        asyncio.run(pieces())
    assert isinstance(error.value.__cause__, KeyError)
    assert found[1:] == [b"piece"]


def test_an_application_that_has_told_its_error_has_answered() -> None:
    async def status() -> int:
        head, *_ = [piece async for piece in exchange(App().asgi, EngineCall("GET", "/fail"))]
        assert isinstance(head, Head)
        return head.status

    assert asyncio.run(status()) == 500


@pytest.mark.parametrize(
    ("path", "raw", "prefix", "wanted"),
    [
        ("/v1/models", b"/v1/models", "", ("/v1/models", b"/v1/models")),
        ("/duo/v1/a b", b"/duo/v1/a%20b", "/duo", ("/v1/a b", b"/v1/a%20b")),
        ("/duo", b"/duo", "/duo", ("/", b"/")),
        ("/v1/a b", None, "/duo", ("/v1/a b", b"/v1/a%20b")),
    ],
)
def test_paths_are_those_below_the_prefix(
    path: str, raw: bytes | None, prefix: str, wanted: tuple[str, bytes]
) -> None:
    scope = below_prefix({"type": "http", "path": path, "raw_path": raw, "root_path": prefix})
    assert (scope["path"], scope["raw_path"], scope["root_path"]) == (*wanted, "")
