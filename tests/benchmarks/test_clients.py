"""Clients of others that install quickly, each in an environment of its own, against `hpu-duo serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.clients.__main__ import check
from benchmarks.clients.client import CLIENTS
from tests.tiers import EXHAUSTIVE

QUICK = ("langchain", "litellm")


@pytest.mark.parametrize("name", [pytest.param(name, marks=EXHAUSTIVE) for name in QUICK])
def test_a_client_is_served(name: str, tmp_path: Path) -> None:
    [client] = (one for one in CLIENTS if one.name == name)
    found = check(client, tmp_path)
    assert "error" not in found, found["error"]
    assert found["seen"]
