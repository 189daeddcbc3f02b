"""Checks of one call, without a device around them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpu_duo.lab.rules import Rule
from hpu_duo.lab.sim.checks import Checks


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten.made", [Rule.NAN]),
        # Fused operators leave lanes of their statistics undefined.
        ("hpu.made", []),
    ],
)
def test_a_number_that_is_none_is_seen_in_every_result(name: str, expected: list[Rule]) -> None:
    broken: list[Rule] = []
    checks = Checks(lambda rule, *_: broken.append(rule))
    call: Any = SimpleNamespace(operator=SimpleNamespace(name=name, is_view=False), sims=())
    checks.after(call, [torch.ones(2), torch.tensor([0.0, torch.nan])], False)
    assert broken == expected
