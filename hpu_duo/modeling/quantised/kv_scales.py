"""Scales of keys and values that a checkpoint has, one of each for a layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

from hpu_duo.modeling.quantised.checkpoint import headers_of

_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?(k|v)_scale$")


def kv_scales(path: str | Path, layers: Iterable[int]) -> dict[int, tuple[float, float]] | None:
    """Read ``k_scale`` and ``v_scale`` of some layers: a number is about its 8-bit code times the scale.

    Args:
        path: directory of a checkpoint.
        layers: their numbers.

    Returns:
        Scale of keys and scale of values by the number of the layer; None where the checkpoint has none, or
        no weights.

    Raises:
        ValueError: a layer lacks one, a scale is no positive number, or a file cannot be read.
    """
    found: dict[tuple[int, str], float] = {}
    for name, header in headers_of(Path(path)).items():
        match = _NAME.search(name)
        if match is None:
            continue
        if math.prod(header.shape) != 1:
            raise header.refused("to be one number", str(list(header.shape)))
        value = float(header.read().float())
        if not (math.isfinite(value) and value > 0):
            raise header.refused("to be above 0 and finite", str(value))
        found[int(match[1]), match[2]] = value
    if not found:
        return None
    numbers = sorted(set(layers))
    for number in numbers:
        for name in "kv":
            if (number, name) not in found:
                raise ValueError(
                    f"{path}: expected {name}_scale of layer {number}, as others have, found none"
                )
    return {number: (found[number, "k"], found[number, "v"]) for number in numbers}
