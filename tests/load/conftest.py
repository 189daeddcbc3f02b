"""A server that answers as a test tells it to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.load.stub_server import Answer, StubServer


@pytest.fixture
def serve() -> Iterator[Callable[..., StubServer]]:
    """Start a server that gives each request the answer made of its JSON body."""
    servers: list[StubServer] = []

    def start(answer: Callable[[dict], Answer]) -> StubServer:
        servers.append(StubServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
