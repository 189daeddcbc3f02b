"""The ranker of an engine whose scheduling policy needs one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpu_duo.limit_config import SchedulerConfig
from hpu_duo.scheduling import make_policy

if TYPE_CHECKING:
    from hpu_duo.ranking import Ranker


def read_ranker(config: SchedulerConfig, vocab_size: int) -> Ranker | None:
    """Read the ranker that a configuration names; None without one.

    Args:
        vocab_size: of the model that is served.

    Raises:
        ValueError: the policy needs one and none is given, or it needs none; the ranker cannot be read, or
            knows a smaller vocabulary.
    """
    name, directory = config.scheduling_policy, config.ranker
    if make_policy(name).needs_scores != (directory is not None):
        wanted = "ranker, a directory," if directory is None else "no ranker, which 'ltr' needs,"
        raise ValueError(f"expected {wanted} with scheduling_policy={name!r}, got {directory}")
    if directory is None:
        return None
    from hpu_duo.ranking import load_ranker

    ranker = load_ranker(Path(directory))
    if ranker.vocab_size is not None and ranker.vocab_size < vocab_size:
        raise ValueError(
            f"expected a ranker with a vocabulary of at least {vocab_size} tokens, got {ranker.vocab_size} "
            f"in {directory}"
        )
    return ranker
