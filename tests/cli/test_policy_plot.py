"""Picture of policies of the KV cache: each has a line that is told from the others."""

import re
from pathlib import Path

from hpu_duo.cli.evaluation.policy_plot import draw_policies
from hpu_duo.kv_policies import KV_POLICIES


def test_all_policies_side_by_side_have_colours_of_their_own(tmp_path: Path) -> None:
    names = ["full", "duo", "streaming", *KV_POLICIES]
    value = {"value": 0.5, "value_low": 0.4, "value_high": 0.6}
    rows = [
        {"task": "passkey", "policy": name, "kv_ratio": at / 20, **value} for at, name in enumerate(names)
    ]
    draw_policies(rows, tmp_path / "curve.svg")
    svg = (tmp_path / "curve.svg").read_text(encoding="utf-8")
    lines = set(re.findall(r"fill: none; stroke: (#\w+)[^\"]*stroke-opacity: 0.85", svg))
    assert len(lines) == len(names) - 1
