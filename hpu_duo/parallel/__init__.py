"""One rank's share of a model: heads, widths and vocabulary cut evenly, after transformers' own plan.

``loading`` and ``share_trial`` need transformers' models and are imported by their own names.
"""

from hpu_duo.parallel.config import ExpertShare, RankHeads, narrowed_config, placed
from hpu_duo.parallel.head_exchange import (
    ContextParallelBlocks,
    Exchanged,
    HeadExchange,
    HeadExchanges,
    StepExchanges,
    head_exchanges,
    summed_score_bytes,
)
from hpu_duo.parallel.latent_exchange import ContextParallelLatents
from hpu_duo.parallel.modules import ScoreExchange, SharedPolicy, Sums, connect
from hpu_duo.parallel.spread_logits import SpreadLogits

__all__ = [
    "ContextParallelBlocks",
    "ContextParallelLatents",
    "Exchanged",
    "ExpertShare",
    "HeadExchange",
    "HeadExchanges",
    "RankHeads",
    "ScoreExchange",
    "SharedPolicy",
    "SpreadLogits",
    "StepExchanges",
    "Sums",
    "connect",
    "head_exchanges",
    "narrowed_config",
    "placed",
    "summed_score_bytes",
]
