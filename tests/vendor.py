"""A stand-in of the vendor's package, and how tests let it be imported."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

STANDIN = Path(__file__).parent / "sim" / "standin"
VARIABLES = (
    *("PT_HPU_LAZY_MODE", "PT_HPU_WEIGHT_SHARING", "PT_HPU_ENABLE_LAZY_COLLECTIVES"),
    *("PT_HPU_RECIPE_CACHE_CONFIG", "PT_HPU_ENABLE_EAGER_CACHE", "FUSER_ENABLE_MULTI_THREADED_INVOCATIONS"),
    *("PT_ENABLE_INT64_SUPPORT", "HLS_MODULE_ID", "HABANA_VISIBLE_MODULES"),
)


def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Until the generator ends, the stand-in is there for the first time, and no variable of its is set."""
    forget()
    for name in VARIABLES:
        # Set first, so that what the device layer sets is undone as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(str(STANDIN))
    yield
    forget()


def choose_mode(monkeypatch: pytest.MonkeyPatch, is_lazy: bool) -> None:
    """Let the stand-in be imported in lazy or in eager mode."""
    monkeypatch.setenv("PT_HPU_LAZY_MODE", str(int(is_lazy)))
    __import__("habana_frameworks.torch.hpu")


def forget() -> None:
    """The next import of the package is the first one again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "habana_frameworks"]:
        del sys.modules[name]


def calls() -> Counter[str]:
    """Counts of calls of the stand-in."""
    return importlib.import_module("habana_frameworks.torch.calls").CALLS
