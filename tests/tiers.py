"""Tiers of tests: ``make slow`` runs some cases of a long list, ``make exhaustive`` runs them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters of which the first and each ``step``-th behind it belong to ``make slow``.

    Args:
        cases: values, or tuples of values.
    """
    marks = {True: (), False: (pytest.mark.exhaustive,)}
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks[number % step == 0])
        for number, case in enumerate(cases)
    ]


def selected(request: pytest.FixtureRequest, name: str, always: Sequence[str] = ()) -> list[str]:
    """Values of a parameter in the tests of a module that this run has, and those that other tests need."""
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    params = [item.callspec.params for item in here if hasattr(item, "callspec")]
    return list(dict.fromkeys([*(each[name] for each in params if name in each), *always]))
