"""Benchmarks are modules of one package: each can be imported, and so begun."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import benchmarks

FOLDER = Path(benchmarks.__path__[0])
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_finds_what_it_imports(name: str) -> None:
    assert import_module(f"benchmarks.{name}").__doc__
