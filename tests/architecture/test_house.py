"""The work that the host does for one decode step may not grow unnoticed."""

from __future__ import annotations

import sys

import pytest

from kernels_ref.x86 import library
from tests.house import count_decode_step

STEPS = {"eager": (367, 52), "replay": (168, 36)}
"""Calls and files of one decode step by capture backend, see ``python -m tests.house``."""

MOST, LEAST = 1.02, 0.9
"""Tolerated shares of these numbers. Below the second one, write the new number down."""


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the numbers were counted on Python 3.11")
@pytest.mark.skipif(not library.is_supported(), reason="the numbers were counted with AVX512 kernels")
@pytest.mark.parametrize("graphs", STEPS)
def test_calls_and_files_of_a_decode_step_do_not_grow(graphs: str) -> None:
    step = count_decode_step(graphs)
    for name, found, expected in zip(("calls", "files"), (step.num_calls, step.num_files), STEPS[graphs]):
        assert LEAST * expected <= found <= MOST * expected, (
            f"{graphs}: expected about {expected} {name} per decode step, counted {found}"
        )
