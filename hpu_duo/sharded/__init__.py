"""One rank's share of a model: heads, widths and vocabulary cut evenly, after transformers' own plan.

``loading`` and ``share_check`` need transformers' models and are imported by their own names.
"""

from hpu_duo.sharded.config import narrowed_config
from hpu_duo.sharded.dealt_blocks import DealtBlocks
from hpu_duo.sharded.exchanged_bytes import (
    Exchanged,
    HeadExchanges,
    StepExchanges,
    head_exchanges,
    summed_score_bytes,
)
from hpu_duo.sharded.experts import ExpertShare
from hpu_duo.sharded.head_exchange import HeadExchange
from hpu_duo.sharded.heads import RankHeads, placed
from hpu_duo.sharded.modules import connect
from hpu_duo.sharded.shared_scores import ScoreExchange, SharedPolicy
from hpu_duo.sharded.sums import Sums

__all__ = [
    "DealtBlocks",
    "Exchanged",
    "ExpertShare",
    "HeadExchange",
    "HeadExchanges",
    "RankHeads",
    "ScoreExchange",
    "SharedPolicy",
    "StepExchanges",
    "Sums",
    "connect",
    "head_exchanges",
    "narrowed_config",
    "placed",
    "summed_score_bytes",
]
