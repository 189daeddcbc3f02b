"""Sampling from logits whose columns are sharded over ranks.

Shapes: N rows of logits, V tokens of the vocabulary, T ranks.
"""

from __future__ import annotations

import torch

from hpu_duo.device.collectives import gather_from_ranks
from hpu_duo.device.ranks import Ranks
from hpu_duo.sampling import SampledTokens, SamplingBatch, SamplingRoute, sample
from hpu_duo.sampling.sampler import most_likely, take_column


class SpreadLogits:
    """Samples from logits whose columns are sharded evenly over ranks.

    Where all rows are plainly greedy, ranks exchange their best candidates, 8 bytes a row. Otherwise they
    exchange all logits, which filters, penalties and log-probabilities need.

    Args:
        ranks: this rank among all.
        group: name of the ranks' process group.
        vocab_size: V; columns of the last rank beyond it are padding.

    Attributes:
        gathered_bytes: bytes that this rank has sent so far.
    """

    def __init__(self, ranks: Ranks, group: str, vocab_size: int) -> None:
        self._ranks, self._group, self._vocab_size = ranks, group, vocab_size
        self.gathered_bytes = 0

    @property
    def num_ranks(self) -> int:
        """Ranks that share the model."""
        return self._ranks.size

    def sample(
        self, own: torch.Tensor, batch: SamplingBatch, floats: torch.Tensor | None = None
    ) -> SampledTokens:
        """Sample one token per row; see ``hpu_duo.sampling.sample``.

        Args:
            own: the rank's logits, float ``[N, ceil(V / T)]``.
        """
        plain = SamplingRoute(batch.route.num_rows, batch.route.vocab_size)
        if batch.route != plain:
            return sample(self.whole(own), batch, floats)
        return SampledTokens(self._greedy(own), None)

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """Return the logits of all ranks, ``[N, V]``."""
        gathered = self._gather(own).unflatten(0, (self._ranks.size, own.shape[0]))
        return gathered.transpose(0, 1).flatten(1)[:, : self._vocab_size]

    def sample_whole(
        self, logits: torch.Tensor, batch: SamplingBatch, floats: torch.Tensor | None = None
    ) -> SampledTokens:
        """Sample one token per row where each rank has all logits; the tokens are those of the first rank.

        Args:
            logits: float ``[N, V]``.
        """
        own = sample(logits, batch, floats).token_ids
        return SampledTokens(self._gather(own)[: len(own)], None)

    def _greedy(self, own: torch.Tensor) -> torch.Tensor:
        first = self._ranks.rank * own.shape[1]
        # With many ranks and few tokens, the last ranks have padding only.
        own = own[:, : max(0, self._vocab_size - first)]
        # Both are exact in float32: token ids are below 2**24.
        found = self._gather(_best(own, first) if own.shape[1] else _none(own))
        best_NT, token_NT = found.view(self._ranks.size, 2, -1).permute(1, 2, 0)
        # Among equal logits, the lowest rank has the lowest token.
        return take_column(token_NT, most_likely(best_NT)).to(torch.int32)

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        self.gathered_bytes += own.nbytes
        return gather_from_ranks(own, self._ranks.size, self._group)


def _best(own: torch.Tensor, first: int) -> torch.Tensor:
    """The largest logit of each row, and its token, ``[2, N]``."""
    place = most_likely(own)
    return torch.stack([take_column(own, place).float(), (place + first).float()])


def _none(own: torch.Tensor) -> torch.Tensor:
    """The candidates of a rank without tokens, ``[2, N]``: minus infinity. The first rank has tokens."""
    best = torch.full((own.shape[0],), float("-inf"), dtype=torch.float32, device=own.device)
    return torch.stack([best, torch.zeros_like(best)])
