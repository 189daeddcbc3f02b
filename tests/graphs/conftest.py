from collections.abc import Iterator

import pytest

from tests.vendor import importable


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for _ in importable(monkeypatch):
        yield monkeypatch
