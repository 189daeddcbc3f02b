"""A server with a certificate is called by https, and may ask its callers for one."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest

from hpu_duo.server.http.listening import Tls
from tests.server.conftest import TinyChat
from tests.server.live import KEY, PATIENCE_S, live

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
