"""A server with a certificate is called by https, and may ask its callers for one."""

from __future__ import annotations

import json
import socket
import ssl
import time
from pathlib import Path

import httpx
import pytest

from hpu_duo.server.http.listening import Tls, bind
from tests.server.conftest import TinyChat
from tests.server.live import HOST, KEY, PATIENCE_S, Live, live, wait_until

FILES = Path(__file__).parent / "tls"
CERTIFICATE, PRIVATE_KEY = FILES / "certificate.pem", FILES / "key.pem"
"""Of localhost and 127.0.0.1, signed by itself, for a hundred years."""
ASKED = {"prompt": "hi", "max_tokens": 2}


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATE))


def test_it_is_called_by_https_and_not_without(tiny: TinyChat) -> None:
    with live(tiny.load(), tls=Tls(CERTIFICATE, PRIVATE_KEY), api_keys=(KEY,)) as server:
        assert server.url.startswith("https://")
        headers = {"Authorization": f"Bearer {KEY}"}
        with server.http(verify=trusting(), headers=headers) as http:
            assert http.post("/v1/completions", json=ASKED).status_code == 200
        with server.http() as http, pytest.raises(httpx.ConnectError, match="certificate"):
            http.get("/health")
        plain = server.url.replace("https", "http")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{plain}/health", timeout=PATIENCE_S)


def test_callers_may_need_a_certificate(tiny: TinyChat) -> None:
    tls = Tls(CERTIFICATE, PRIVATE_KEY, client_certificates=CERTIFICATE)
    with live(tiny.load(), tls=tls) as server:
        with server.http(verify=trusting()) as http, pytest.raises(httpx.TransportError):
            http.get("/health")
        known = trusting()
        known.load_cert_chain(CERTIFICATE, PRIVATE_KEY)
        with server.http(verify=known) as http:
            assert http.post("/v1/completions", json=ASKED).status_code == 200


def test_a_slow_reader_gets_the_end_of_an_answer_of_a_server_that_ends(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bind_small(host: str, port: int) -> socket.socket:
        bound = bind(host, port)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return bound

    monkeypatch.setattr("tests.server.live.bind", bind_small)
    server = Live(tiny.load(), tls=Tls(CERTIFICATE, PRIVATE_KEY), flush_seconds=PATIENCE_S)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x" * 10_000}]
    asked = {"messages": talk, "n": 16, "max_tokens": 1, "echo": True, "truncate_prompt_tokens": 9}
    data = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    found = bytearray()
    with socket.create_connection((HOST, server.port), timeout=PATIENCE_S) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with trusting().wrap_socket(plain, server_hostname=HOST) as opened:
            opened.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
            found += opened.recv(100)
            wait_until(server.holds_nothing)
            server.signal()
            [connection] = server.server.server_state.connections
            while not connection.cycle.response_complete:  # type: ignore[union-attr]
                found += opened.recv(1 << 14)
            # Its end is written, and lies in buffers of the server.
            time.sleep(1.5)
            while piece := _received(opened):
                found += piece
    assert server.join()
    answer = json.loads(found.partition(b"\r\n\r\n")[2])
    assert [len(choice["message"]["content"]) > 10_000 for choice in answer["choices"]] == [True] * 16


def _received(opened: ssl.SSLSocket) -> bytes:
    try:
        return opened.recv(1 << 14)
    except (ConnectionError, ssl.SSLEOFError):
        return b""
