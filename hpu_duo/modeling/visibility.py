"""Read the window of each layer from transformers' mask rules, without building a mask.

transformers passes its mask rule to the mask function of an attention implementation. Ours evaluates the rule
at far positions, and attaches the window to a tensor that reaches the layers in place of a mask. So a layer's
window is read from the keys that are masked, not from an argument or a field of the configuration that a
family may set and not use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_FAR = 1 << 24
_LONGEST = 1 << 22
# Two positions that no chunk length divides alike.
_QUERIES = (_FAR, _FAR + 4099)
_IRREGULAR = -1.0
_WINDOW = "hpu_duo_window"

Rule = Callable[..., torch.Tensor]


def look_through(rule: Rule) -> float:
    """Return the window of a mask rule: tokens seen, the own one included; infinity when it has no bound.

    Returns:
        A negative number for a rule that is not causal, or that is not the same window everywhere.
    """
    windows = {_window_at(rule, query) for query in _QUERIES}
    return windows.pop() if len(windows) == 1 else _IRREGULAR


def read_window(mask: torch.Tensor | None) -> float | None:
    """Return the result of ``look_through`` for the mask that a layer received.

    The window is an attribute of the very tensor that our mask function returned. Any tensor that a model
    makes of it, such as a sum with biases or a choice of keys by content, does not have the attribute.

    Returns:
        None if the layer received another tensor, or no mask.
    """
    window: float | None = getattr(mask, _WINDOW, None)
    return window


def _window_at(rule: Rule, query: int) -> float:
    def sees(distance: int) -> bool:
        zero = torch.tensor(0)
        return bool(rule(zero, zero, torch.tensor(query), torch.tensor(query - distance)))

    if sees(-1) or not sees(0):
        return _IRREGULAR
    if sees(_LONGEST):
        return math.inf
    seen, hidden = 0, _LONGEST
    while hidden - seen > 1:
        middle = (seen + hidden) // 2
        seen, hidden = (middle, hidden) if sees(middle) else (seen, middle)
    return float(hidden)


def mark(
    *_: Any,
    mask_function: Rule,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    **__: Any,
) -> torch.Tensor:
    """The mask function that transformers calls: a tensor that carries the window of the rule."""
    window = look_through(mask_function)
    # Its value is for people who print it; attention of a family's own making adds it to scores.
    marker = torch.full((1, 1, 1, 1), window, dtype=torch.float64).to(device, dtype)
    setattr(marker, _WINDOW, window)
    return marker
