"""Picture of policies of the KV cache: each has a line that is told from the others."""

import re
from pathlib import Path

import numpy as np

from hpu_duo.cli.evaluation.report import draw_policies
from hpu_duo.cli.heads.views import draw_heads, effort
from hpu_duo.heads import HeadPattern
from hpu_duo.heads.eviction import KV_POLICIES

LINE = re.compile(r"fill: none; stroke: (#(?!000000)\w+); stroke-width: ([\d.]+)")
"""Colour and width of a line or of an error bar."""


def test_all_policies_side_by_side_have_colours_of_their_own(tmp_path: Path) -> None:
    names = ["full", "duo", "streaming", *KV_POLICIES]
    value = {"value": 0.5, "value_low": 0.4, "value_high": 0.6}
    rows = [
        {"task": "passkey", "policy": name, "kv_ratio": at / 20, **value} for at, name in enumerate(names)
    ]
    draw_policies(rows, tmp_path / "curve.svg")
    svg = (tmp_path / "curve.svg").read_text(encoding="utf-8")
    lines = {colour for colour, _ in LINE.findall(svg)}
    assert len(lines) == len(names) - 1


def _words(svg: Path) -> str:
    """Return what matplotlib writes beside the outlines of each text."""
    return "\n".join(re.findall(r"<!-- (.*?) -->", svg.read_text(encoding="utf-8")))


def test_axes_say_what_they_show_and_lines_over_each_other_have_other_widths(tmp_path: Path) -> None:
    value = {"value": 0.5, "value_low": 0.4, "value_high": 0.6}
    rows = [
        {"task": task, "policy": name, "kv_ratio": ratio, **value}
        for task in ("passkey", "perplexity")
        for name in ("h2o", "tova", "snapkv")
        for ratio in (0.2, 0.5)
    ]
    draw_policies(rows, tmp_path / "curve.svg")
    assert {"exact answers", "perplexity"} <= set(_words(tmp_path / "curve.svg").splitlines())
    svg = (tmp_path / "curve.svg").read_text(encoding="utf-8")
    found = LINE.findall(svg)
    widths = {colour: max(float(width) for one, width in found if one == colour) for colour, _ in found}
    assert len(set(widths.values())) == 3


def test_the_map_of_heads_says_how_many_steps_it_took(tmp_path: Path) -> None:
    scores = np.array([[0.2, 0.9]])
    pattern = HeadPattern(scores, 4, 16, config={"num_steps": 2000}).binarise(threshold=0.5)
    assert effort(pattern) == ", 2,000 steps"
    draw_heads([("model, framed: score > 0.5", pattern)], tmp_path / "heads.png")
