import pytest
import torch

from hpu_duo.sampling import SamplingBatch, SamplingParams, SamplingRow, sample
from hpu_duo.sampling.sampler import gather_logprobs

torch.set_num_threads(1)


@pytest.mark.parametrize("num_top", [0, 1, 5, 32, 33, 100])
@pytest.mark.parametrize("ties", [False, True])
def test_top_logprobs_are_sorted_with_the_lowest_id_first_among_equals(num_top: int, ties: bool) -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(2))
    if ties:
        logits = (logits * 2).round()
    got = gather_logprobs(logits, torch.tensor([3, 99, 0, 50], dtype=torch.int32), num_top)
    exact = torch.log_softmax(logits.double(), -1)
    for row in range(4):
        order = sorted(range(100), key=lambda t: (-logits[row, t].item(), t))[:num_top]
        assert got.top_ids[row].tolist() == order
        assert torch.allclose(got.top[row].double(), exact[row, order], atol=1e-5)
    assert (got.top_ids.dtype, got.rank.dtype) == (torch.int32, torch.int32)


def test_rank_counts_the_tokens_at_least_as_likely() -> None:
    got = gather_logprobs(
        torch.tensor([[1.0, 3.0, 2.0, 3.0]] * 3), torch.tensor([1, 2, 0], dtype=torch.int32), 0
    )
    assert got.rank.tolist() == [2, 3, 4]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(temperature=0.2, logit_bias={7: 100.0}, top_k=3, logprobs=2)
    result = sample(logits, SamplingBatch.build([SamplingRow(params)], 50))
    assert result.token_ids.tolist() == [7]
    assert result.logprobs is not None
    assert result.logprobs.sampled.item() == pytest.approx(torch.log_softmax(logits, -1)[0, 7].item())
    assert result.logprobs.rank.item() == 1 + int((logits > logits[0, 7]).sum())
    assert result.logprobs.top_ids[0, :2].tolist() == logits.topk(2).indices[0].tolist()


def test_impossible_tokens_have_finite_logprobs_and_no_id_comes_twice() -> None:
    logits = torch.full((1, 6), float("-inf"))
    logits[0, 4] = 0.0
    got = gather_logprobs(logits, torch.tensor([2], dtype=torch.int32), 6)
    assert sorted(got.top_ids[0].tolist()) == list(range(6))
    assert torch.isfinite(got.top).all()
    assert torch.isfinite(got.sampled).all()


def test_nothing_is_computed_when_nobody_asks() -> None:
    assert sample(torch.zeros(1, 5), SamplingBatch.build([SamplingRow(SamplingParams())], 5)).logprobs is None
