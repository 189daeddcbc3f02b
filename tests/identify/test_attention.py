"""Banded attention and its gradients against one dense mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.lab.identify.attention import Band, Weighing, banded_attention, full_attention, query_blocks
from tests.modeling.dense_oracle import sees
from tests.tiers import crossed


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weighing: Weighing, seen: torch.Tensor
) -> torch.Tensor:
    """One query head at a time, all scores, plain exponentials."""
    group = q.shape[1] // k.shape[1]
    out = []
    for head in range(q.shape[1]):
        scores = q[0, head] @ k[0, head // group].T * weighing.scale
        if weighing.softcap is not None:
            scores = weighing.softcap * torch.tanh(scores / weighing.softcap)
        weights = torch.exp(scores) * seen
        total = weights.sum(-1, keepdim=True)
        if weighing.sinks is not None:
            total = total + weighing.sinks[head].exp()
        out.append(weights / total @ v[0, head // group])
    return torch.stack(out)[None]


def mask(num_tokens: int, band: Band) -> torch.Tensor:
    return torch.tensor(
        [[float(sees(q, k, band.sink, band.recent)) for k in range(num_tokens)] for q in range(num_tokens)]
    )


@given(
    num_tokens=st.integers(1, 60),
    band=st.builds(Band, st.integers(0, 12), st.integers(1, 70)),
    size=st.integers(1, 20),
)
def test_blocks_show_each_query_exactly_the_keys_of_the_rule(num_tokens: int, band: Band, size: int) -> None:
    key_ids = torch.arange(num_tokens).unsqueeze(1)
    seen = torch.zeros(num_tokens, num_tokens)
    for block in query_blocks(num_tokens, band, size):
        keys = block.keys(key_ids).flatten()
        assert len(keys.unique()) == len(keys) <= band.sink + band.recent + size
        seen[block.start : block.end, keys] = block.visible(band, torch.device("cpu")).float()
    assert torch.equal(seen, mask(num_tokens, band))


@pytest.mark.parametrize(
    ("weighing", "band"),
    crossed(
        {
            "plain": Weighing(0.5),
            "softcap": Weighing(0.3, softcap=2.0),
            "sinks": Weighing(0.4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
        },
        [Band(0, 1), Band(4, 16), Band(16, 300), Band(300, 8), Band(0, 700)],
    ),
)
def test_banded_attention_and_its_gradients_equal_dense_ones(band: Band, weighing: Weighing) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 530, 8, requires_grad=True) for heads in (4, 2, 2))
    inputs = [q, k, v]
    upstream = torch.randn(1, 4, 530, 8)
    out = banded_attention(q, k, v, weighing, band)
    expected = dense(q, k, v, weighing, mask(530, band))
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
    for got, wanted in zip(
        torch.autograd.grad((out * upstream).sum(), inputs), _grads(expected, upstream, inputs)
    ):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3)


def _grads(out: torch.Tensor, upstream: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad((out * upstream).sum(), inputs)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_full_attention_sees_every_earlier_token(softcap: float | None) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, heads, 300, 8) for heads in (4, 2, 2))
    weighing = Weighing(0.3, softcap)
    expected = dense(q, k, v, weighing, torch.ones(300, 300).tril())
    torch.testing.assert_close(full_attention(q, k, v, weighing), expected, atol=2e-5, rtol=1e-4)
