"""Rankings of requests by the length that their outputs will have; ``hpu_duo.ranking.train`` learns them."""

from hpu_duo.ranking.encoder import EncoderRanker
from hpu_duo.ranking.files import load_ranker, save_ranker
from hpu_duo.ranking.linear import LinearRanker
from hpu_duo.ranking.ranker import Ranker

__all__ = ["EncoderRanker", "LinearRanker", "Ranker", "load_ranker", "save_ranker"]
