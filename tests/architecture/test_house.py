"""The work that the host does for one decode step may not grow unnoticed."""

from __future__ import annotations

import sys

import pytest

from kernels_ref.x86 import library
from tests.house import count_decode_step

STEPS = {
    ("x86", "eager"): (362, 39),
    ("x86", "replay"): (163, 29),
    ("torch", "eager"): (465, 42),
    ("torch", "replay"): (257, 34),
}
"""Calls and files of one decode step by kernels and capture backend, see ``python -m tests.house``.

``torch`` is a CPU without AVX512-BF16, as ``HPU_DUO_X86_KERNELS=0`` makes of any other one.
"""

MOST, LEAST = 1.02, 0.85
"""Tolerated shares of these numbers. Below the second one, write the new number down.

Torch's path has up to 13 % fewer calls on CPUs without AVX512.
"""


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the numbers were counted on Python 3.11")
@pytest.mark.parametrize(("kernels", "graphs"), STEPS)
def test_calls_and_files_of_a_decode_step_do_not_grow(
    kernels: str, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "torch":
        monkeypatch.setenv(library.SWITCH, "0")
        monkeypatch.setattr(library, "_load", lambda *_: False)
    elif not library.is_supported():
        pytest.skip("needs a CPU with AVX512-BF16")
    step, numbers = count_decode_step(graphs), STEPS[kernels, graphs]
    for name, found, expected in zip(("calls", "files"), (step.num_calls, step.num_files), numbers):
        assert LEAST * expected <= found <= MOST * expected, (
            f"{kernels}, {graphs}: expected about {expected} {name} per decode step, counted {found}"
        )
