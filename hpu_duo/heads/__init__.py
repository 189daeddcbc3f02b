"""Head patterns: the KV heads that store the whole context, and weights reordered to match."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpu_duo.heads.binarise import Balance, CountRule, TieBreak, fewest_promotions
from hpu_duo.heads.pattern import HeadLayout, HeadPattern

if TYPE_CHECKING:
    from hpu_duo.heads.permute import permute_heads

__all__ = [
    "Balance",
    "CountRule",
    "HeadLayout",
    "HeadPattern",
    "TieBreak",
    "fewest_promotions",
    "permute_heads",
]

_HOMES = {
    "permute_heads": "hpu_duo.heads.permute",
}


def __getattr__(name: str) -> Any:
    # Their modules import torch, which planning and simulation do not need.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
