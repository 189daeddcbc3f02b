"""The loss of a ranking as a whole."""

from __future__ import annotations

import torch


def list_mle(scores: torch.Tensor, lengths: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return minus the log-likelihood of the right order, lowest score and length first, per place.

    The likelihood is that of drawing the requests one after the other, each with a probability in proportion
    to ``exp(-score)`` among those that are left. Requests of the same length come in a random order.

    Args:
        scores: float32 [N], N at least 1.
        lengths: [N].
        generator: puts requests of the same length in order.

    Source: Xia et al. 2008, Listwise Approach to Learning to Rank.
    """
    shuffled = torch.randperm(len(lengths), generator=generator)
    order = shuffled[torch.sort(lengths[shuffled], stable=True).indices]
    wanted = -scores[order]
    # Of each place the log of the sum over the places from there on.
    left = torch.logcumsumexp(wanted.flip(0), 0).flip(0)
    return (left - wanted).mean()
