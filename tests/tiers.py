"""Tiers of tests: ``make test`` and ``make slow`` run some cases of a long list, ``make exhaustive`` all."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)
"""Marks of a further case of what a fast test, or another slow one, tries."""


def may_have_slow_tests(path: Path) -> bool:
    """Whether a file of tests names a later tier: runs of slow tests import no others."""
    text = path.read_text(encoding="utf-8")
    return "mark.slow" in text or "tests.tiers" in text


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


def further(*cases: Any) -> list[Any]:
    """Exhaustive parameters: more cases of what those beside them in a list try.

    Args:
        cases: values, or tuples of values.
    """
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=EXHAUSTIVE) for case in cases]


def crossed(*factors: Iterable[Any], fast: Container[str] | None = None) -> list[Any]:
    """Parameters of all combinations of values, of which a Latin square stays in the tier of the test.

    There each value occurs, and each two values of two factors if there is a third one. The others are
    exhaustive. All values of a single factor stay.

    Args:
        factors: values, or a mapping whose keys name them in the tests' names.
        fast: names of the values of the first factor that stay in the tier; None = all.
    """
    lists = [list(values.items() if isinstance(values, Mapping) else _named(values)) for values in factors]
    modulus = min(map(len, lists)) if len(lists) > 1 else 1
    return [
        pytest.param(
            *(value for _, (_, value) in case),
            id="-".join(name for _, (name, _) in case),
            marks=()
            if sum(number for number, _ in case) % modulus == 0 and (fast is None or case[0][1][0] in fast)
            else EXHAUSTIVE,
        )
        for case in product(*map(enumerate, lists))
    ]


def _named(values: Iterable[Any]) -> list[tuple[str, Any]]:
    """Values with their names in the names of tests."""
    return [
        (str(value) if isinstance(value, str | int | None) else getattr(value, "name", str(number)), value)
        for number, value in enumerate(values)
    ]


def selected(request: pytest.FixtureRequest, name: str, always: Sequence[str] = ()) -> list[str]:
    """Values of a parameter in the tests of a module that this run has, and those that other tests need."""
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    params = [item.callspec.params for item in here if hasattr(item, "callspec")]
    return list(dict.fromkeys([*(each[name] for each in params if name in each), *always]))
