"""Drafters: guesses of the next tokens of requests, on the host, from text alone."""

from hpu_duo.config.speculation import SpeculativeConfig
from hpu_duo.drafting.drafter import Drafter
from hpu_duo.drafting.ngram import NgramDrafter
from hpu_duo.drafting.predicted import PredictedOutput
from hpu_duo.drafting.suffix import SuffixDrafter, SuffixOptions

__all__ = ["Drafter", "NgramDrafter", "PredictedOutput", "SuffixDrafter", "SuffixOptions", "make_drafter"]


def make_drafter(config: SpeculativeConfig) -> Drafter:
    """Create the drafter of a configuration."""
    drafter = _make(config)
    drafter.most_by_rows = config.num_speculative_tokens_per_batch_size or ()
    return drafter


def _make(config: SpeculativeConfig) -> Drafter:
    num_drafts = config.num_speculative_tokens
    if config.has_own_stores:
        return Drafter()
    if config.method == "ngram":
        return NgramDrafter(*config.ngram_sizes, num_drafts)
    options = SuffixOptions(
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_cached_requests,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
    )
    return SuffixDrafter(options, num_drafts)
