"""A server of each test's own."""

from pathlib import Path

import pytest

from tests.examples.gaudi.gaudi_server import Server


@pytest.fixture
def server(tmp_path: Path) -> Server:
    """A server without cards."""
    return Server(tmp_path)
