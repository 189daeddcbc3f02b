"""Head patterns: the KV heads that keep the whole context, and weights reordered to match."""

from hpu_duo.heads.binarise import Balance, TieBreak
from hpu_duo.heads.counts import CountRule, fewest_promotions
from hpu_duo.heads.layout import HeadLayout
from hpu_duo.heads.pattern import HeadPattern
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
