"""Ranks choose greedy tokens like one, also where the last of them hold padding alone."""

from __future__ import annotations

import pytest
import torch

from hpu_duo.device.ranks import Ranks
from hpu_duo.parallel import SpreadLogits, spread_logits
from hpu_duo.sampling import SamplingBatch, SamplingRow
from hpu_duo.sampling.params import SamplingParams
from tests.ranks.threads import ThreadRanks


@pytest.mark.parametrize(("vocab_size", "size"), [(5, 4), (7, 4), (8, 4), (3, 8), (2, 4), (97, 2), (1, 2)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_greedy_tokens_are_those_of_the_whole_logits(
    vocab_size: int, size: int, sign: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ThreadRanks(size)
    monkeypatch.setattr(spread_logits, "gather_from_ranks", ranks.gather)
    width = -(-vocab_size // size)
    # Padding is larger than what any token has where all logits are negative.
    whole = torch.zeros(6, width * size)
    whole[:, :vocab_size] = sign * (torch.rand(6, vocab_size, generator=torch.Generator().manual_seed(0)) + 1)
    rows = [SamplingRow(SamplingParams(temperature=0))] * 6
    batch = SamplingBatch.build(rows, vocab_size)

    def one(rank: int) -> torch.Tensor:
        spread = SpreadLogits(Ranks(rank, size), "", vocab_size)
        own = whole[:, rank * width : (rank + 1) * width].contiguous()
        return spread.sample(own, batch).token_ids

    expected = whole[:, :vocab_size].argmax(dim=1).int()
    for found in ranks.run(one):
        assert torch.equal(found, expected)
