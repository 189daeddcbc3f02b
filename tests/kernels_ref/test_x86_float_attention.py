"""Prompts of float32 queries against float64, each number of lanes against the model, choices as torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bias_builders import Window
from kernels_ref.partial import Partial
from kernels_ref.x86 import library as x86
from tests.needs import needs_x86_kernels

pytestmark = [
    needs_x86_kernels,
    pytest.mark.instruction_set,
]

STORES = (torch.bfloat16, torch.float16, torch.float32)
NAMES = x86.variants(torch.float32)


def empty(q: torch.Tensor) -> Partial:
    """A partial over no keys, with no finite attention."""
    return Partial(torch.full(q.shape, torch.nan), torch.full(q.shape[:3], -1.0e30), torch.zeros(q.shape[:3]))


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen_ST: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention, log-sum-exps and weights."""
    scores = torch.einsum("skgd,tkd->skgt", q.double(), k.double())
    scores = scores.masked_fill(~seen_ST[:, None, None], -torch.inf)
    weights = scores.softmax(-1)
    return torch.einsum("skgt,tkd->skgd", weights, v.double()), scores.logsumexp(-1), weights


def draw(store: torch.dtype, keys: int, group: int, dim: int, seed: int) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(keys, 2, group, dim, generator=gen) * 2 * dim**-0.5
    k, v = (torch.randn(2, keys, dim, generator=gen).to(store).transpose(0, 1) for _ in range(2))
    return q, k, v


@settings(deadline=None, max_examples=40)
@given(
    store=st.sampled_from(STORES),
    keys=st.one_of(st.integers(1, 100), st.just(300)),
    group=st.integers(1, 5),
    dim=st.sampled_from([16, 64, 112, 256]),
    window=st.one_of(st.none(), st.builds(Window, st.integers(0, 70), st.integers(1, 90))),
    seed=st.integers(0, 99),
)
def test_prompts_see_what_they_should_with_the_bits_of_the_model(
    store: torch.dtype, keys: int, group: int, dim: int, window: Window | None, seed: int
) -> None:
    q, k, v = draw(store, keys, group, dim, seed)
    names = NAMES if keys * dim < 10_000 else NAMES[:-1]
    found = []
    for name in names:
        found.append(empty(q))
        x86.attend(found[-1], q, k, v, is_causal=True, window=window, instructions=name)
    place = torch.arange(keys)
    seen = place[:, None] >= place
    if window is not None:
        seen &= (place[:, None] - place < window.recent) | (place < window.sink)
    expected, lse, _ = exact(q, k, v, seen)
    for attn, largest, total in found:
        torch.testing.assert_close((attn / total[..., None]).double(), expected, atol=3e-5, rtol=3e-5)
        torch.testing.assert_close((largest + total.log()).double(), lse, atol=3e-5, rtol=1e-5)
    if names[-1] == "model":
        assert all(map(torch.equal, found[0], found[-1]))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("threads", [1, 2])
def test_keys_in_two_lists_are_merged(store: torch.dtype, threads: int) -> None:
    q, k, v = draw(store, 90, 3, 64, 5)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        total = empty(q)
        for part in (slice(0, 0), slice(0, 17), slice(17, 90)):
            x86.attend(total, q, k[part], v[part])
    finally:
        torch.set_num_threads(before)
    expected, *_ = exact(q, k, v, torch.ones(90, 90, dtype=torch.bool))
    torch.testing.assert_close((total.attn / total.sum[..., None]).double(), expected, atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=30)
@given(
    store=st.sampled_from(STORES),
    keys=st.integers(1, 140),
    group=st.integers(1, 4),
    offset=st.one_of(st.none(), st.integers(0, 40)),
    seed=st.integers(0, 99),
)
def test_sums_of_weights_are_those_of_the_queries_that_see_a_key(
    store: torch.dtype, keys: int, group: int, offset: int | None, seed: int
) -> None:
    q, k, v = draw(store, keys, group, 32, seed)
    place = torch.arange(keys)
    seen = torch.ones(keys, keys, dtype=torch.bool) if offset is None else place <= place[:, None] + offset
    _, lse, weights = exact(q, k, v, seen)
    found = [x86.column_sums(q, k, lse.float(), offset=offset, instructions=name) for name in NAMES]
    for sums in found:
        torch.testing.assert_close(sums.double(), weights.sum((0, 2)), atol=1e-4, rtol=1e-4)
    assert torch.equal(found[0], found[-1])


@settings(deadline=None, max_examples=40)
@given(
    width=st.one_of(st.integers(1, 40), st.integers(1000, 3000)),
    has_nan=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_largest_is_the_first_of_equals_or_the_first_that_is_not_a_number(
    width: int, has_nan: bool, seed: int
) -> None:
    rows = torch.randint(-3, 4, (3, width), generator=torch.Generator().manual_seed(seed)).float()
    rows[1] = -torch.inf
    if has_nan:
        rows[2, [width // 2, width - 1]] = torch.nan
    assert x86.fits_logits(rows)
    for name in NAMES:
        found = torch.ops.hpu_duo_x86_v3.place_of_largest(rows, x86.NUMBER_OF[name])
        assert found.tolist() == rows.argmax(dim=-1).tolist()


def test_dtypes_that_do_not_go_together_are_refused() -> None:
    q, k, v = draw(torch.float16, 4, 1, 16, 0)
    with pytest.raises(ValueError, match="expected values of Half, got Float"):
        x86.attend(empty(q), q, k, v.float())
    assert x86.fits_tiles(q, k)
    assert not x86.fits_tiles(q.half(), k)
    assert not x86.fits_tiles(q, k.double())
