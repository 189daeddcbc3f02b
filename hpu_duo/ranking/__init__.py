"""Rankings of requests by the length that their outputs will have, learned from recorded traffic."""

from hpu_duo.ranking.encoder import EncoderRanker
from hpu_duo.ranking.examples import VOCABULARY, Examples, TracePrompts
from hpu_duo.ranking.files import load_ranker, save_ranker
from hpu_duo.ranking.kendall import kendall_tau
from hpu_duo.ranking.linear import LinearRanker
from hpu_duo.ranking.loss import list_mle
from hpu_duo.ranking.ranker import Ranker
from hpu_duo.ranking.train import TrainingPlan, TrainingReport, train

__all__ = [
    "VOCABULARY",
    "EncoderRanker",
    "Examples",
    "LinearRanker",
    "Ranker",
    "TracePrompts",
    "TrainingPlan",
    "TrainingReport",
    "kendall_tau",
    "list_mle",
    "load_ranker",
    "save_ranker",
    "train",
]
