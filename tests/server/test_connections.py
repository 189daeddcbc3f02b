"""Connections that are silent, slow or without a key take little, and not for long."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from hpu_duo.server.http.listening import ConnectionLimits, Tls
from tests.server.conftest import TinyChat
from tests.server.live import HOST, KEY, PATIENCE_S, Live, live, wait_until
from tests.server.test_pressure import slowed
from tests.server.test_tls import CERTIFICATE, PRIVATE_KEY, trusting

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@contextmanager
def connection(server: Live) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, server.port), timeout=PATIENCE_S) as opened:
        yield opened


def rest(opened: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = bytearray()
    try:
        while piece := opened.recv(1 << 16):
            found += piece
    except ConnectionError:
        pass
    return bytes(found)


@pytest.mark.parametrize(
    ("sent", "drip", "answer"),
    [
        (b"", b"", b""),
        (b"GET /health HT", b"", b""),
        (b"GET /health HTTP/1.1\r\nx: ", b"y", b""),
        (HEALTH, b"", b"HTTP/1.1 200"),
        (HEALTH + b"GET /he", b"a", b"HTTP/1.1 200"),
        (POST + b"Content-Length: 1000\r\n\r\n", b"a", b""),
        (b"GET /nothing HTTP/1.1\r\nContent-Length: 1000\r\n\r\n", b"a", b"HTTP/1.1 404"),
    ],
)
def test_connections_that_are_silent_or_slow_are_closed(
    tiny: TinyChat, sent: bytes, drip: bytes, answer: bytes
) -> None:
    is_over = threading.Event()

    def dripping() -> None:
        while not is_over.wait(0.02):
            try:
                opened.sendall(drip)
            except OSError:
                return

    with live(tiny.load(), limits=ConnectionLimits(head_s=0.3)) as server, connection(server) as opened:
        opened.sendall(sent)
        thread = threading.Thread(target=dripping)
        thread.start()
        found = rest(opened)
        is_over.set()
        thread.join()
    assert found[: len(answer)] == answer
    assert bool(found) == bool(answer)


def test_a_stream_that_takes_longer_is_not_closed(tiny: TinyChat, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(tiny.load(), limits=ConnectionLimits(head_s=0.1)) as server:
        slowed(server, 0.02, monkeypatch)
        asked: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 60}
        create: Any = server.client().completions.create
        done = list(create(**asked, stream=True, extra_body={"ignore_eos": True}))
        assert done[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 257 + b"\r\n",
        b"GET /health HTTP/1.1\r\na: " + b"b" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\na: " + b"b" * 70_000,
        b"GET /health?" + b"b" * 70_000,
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\na: " + b"b" * 300_000,
    ],
)
def test_headers_that_are_too_long_are_refused_before_keys_are_read(tiny: TinyChat, sent: bytes) -> None:
    with live(tiny.load(), api_keys=(KEY,)) as server, connection(server) as opened:
        opened.sendall(sent)
        answer = rest(opened)
    if b"chunked" not in sent:  # there the key is missing, and that is told first
        assert answer.startswith(b"HTTP/1.1 431 ")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "headers_too_long"
        assert "256 header fields, and 65,536 bytes" in error["message"]


def test_as_many_headers_as_may_be_are_served(server: Live) -> None:
    headers = {f"x-{number}": "y" * 100 for number in range(230)}
    done = server.client(default_headers=headers).completions.create(model="tiny", prompt="hi", max_tokens=1)
    assert done.choices


def test_of_connections_without_a_key_the_oldest_are_closed(tiny: TinyChat) -> None:
    limits = ConnectionLimits(max_unauthenticated=2)
    with live(tiny.load(), api_keys=(KEY,), limits=limits) as server:
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}) as known:
            assert known.get("/v1/models").status_code == 200
            opened = [socket.create_connection((HOST, server.port), timeout=PATIENCE_S) for _ in range(2)]
            # What needs no key makes nobody known.
            opened[0].sendall(HEALTH)
            assert opened[0].recv(1 << 16).startswith(b"HTTP/1.1 200")
            opened.append(socket.create_connection((HOST, server.port), timeout=PATIENCE_S))
            assert rest(opened[0]) == b""
            assert len(server.server.server_state.connections) == 3
            [number] = {id(one) for one in known._transport._pool.connections}  # type: ignore[attr-defined]
            assert known.get("/v1/models").status_code == 200
            assert {id(one) for one in known._transport._pool.connections} == {number}  # type: ignore[attr-defined]
            for one in opened:
                one.close()
        wait_until(lambda: not server.server.server_state.connections)


@pytest.mark.parametrize("is_tls", [False, True])
def test_no_connection_without_an_answer_under_way_keeps_a_server_that_ends(
    tiny: TinyChat, caplog: pytest.LogCaptureFixture, is_tls: bool
) -> None:
    server = Live(tiny.load(), tls=Tls(CERTIFICATE, PRIVATE_KEY) if is_tls else None)
    opened = [socket.create_connection((HOST, server.port), timeout=PATIENCE_S) for _ in range(4)]
    if is_tls:
        opened = [trusting().wrap_socket(one, server_hostname=HOST) for one in opened]
    for one, sent in zip(opened, (b"", b"GET /", HEALTH, POST + b"Content-Length: 9\r\n\r\n{")):
        one.sendall(sent)
    assert opened[2].recv(100).startswith(b"HTTP/1.1 200")
    connections = server.server.server_state.connections
    wait_until(lambda: sum(one.cycle is not None for one in connections) == 2)  # type: ignore[union-attr]
    server.signal()
    assert server.join()
    assert "timeout graceful shutdown exceeded" not in caplog.text
    for one in opened:
        one.close()
