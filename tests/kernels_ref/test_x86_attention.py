"""The tiled kernel against float64 attention over the same inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bias_builders import Window
from kernels_ref.partial import Partial, empty
from kernels_ref.x86 import library as x86
from kernels_ref.x86.library import Instructions, has_tiles, is_supported, variants

here = pytest.mark.skipif(not is_supported(), reason="needs a CPU with AVX512-BF16")
each = pytest.mark.parametrize("instructions", variants())


def draw_inputs(
    num_queries: int, num_keys: int, num_kv: int, group: int, dim: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    shapes = ((num_queries, num_kv, group, dim), (num_keys, num_kv, dim), (num_keys, num_kv, dim))
    q, k, v = (torch.randn(shape, generator=gen).bfloat16() for shape in shapes)
    return q * (2 * dim**-0.5), k, v


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen_ST: torch.Tensor) -> torch.Tensor:
    """Plain softmax attention in float64; zero for a query that sees nothing."""
    scores = torch.einsum("skgd,tkd->skgt", q.double(), k.double())
    scores = scores.masked_fill(~seen_ST[:, None, None], -torch.inf)
    return torch.einsum("skgt,tkd->skgd", scores.softmax(-1).nan_to_num(), v.double())


def result(total: Partial) -> torch.Tensor:
    return total.attn / total.sum.clamp(min=1e-30)[..., None]


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    # Weights are rounded to bfloat16 once; they sum to 1 and values are of size 1.
    error = (out.double() - expected).abs()
    assert error.max() < 2 * torch.finfo(torch.bfloat16).eps
    assert error.mean() < torch.finfo(torch.bfloat16).eps / 8


@here
@each
@settings(deadline=None, max_examples=40)
@given(
    data=st.data(),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 7), (3, 1)]),
    dim=st.sampled_from([16, 48, 64, 80, 128, 256]),
    window=st.one_of(st.none(), st.builds(Window, st.integers(0, 150), st.integers(1, 200))),
    seed=st.integers(0, 99),
)
def test_causal_and_streaming_queries_see_exactly_their_keys(
    data: st.DataObject,
    instructions: Instructions,
    heads: tuple[int, int],
    dim: int,
    window: Window | None,
    seed: int,
) -> None:
    longest = 90 if instructions == "model" else 700
    length = data.draw(st.one_of(st.integers(1, 40), st.integers(40, longest)))
    q, k, v = draw_inputs(length, length, *heads, dim, seed)
    total = empty(q)
    x86.attend(total, q, k, v, is_causal=True, window=window, instructions=instructions)
    query, key = torch.arange(length)[:, None], torch.arange(length)
    seen = key <= query
    if window is not None:
        seen &= (key < window.sink) | (query - key < window.recent)
    assert_close(result(total), exact(q, k, v, seen))


@here
@each
@settings(deadline=None, max_examples=30)
@given(
    num_queries=st.integers(1, 120),
    cuts=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    growth=st.sampled_from([1.0, 1.7, 0.5]),
    seed=st.integers(0, 99),
)
def test_keys_that_come_in_parts_merge_into_attention_over_all_of_them(
    instructions: Instructions, num_queries: int, cuts: list[int], growth: float, seed: int
) -> None:
    """Scores may grow from part to part, so that what was summed before has to fade."""
    if instructions == "model":
        num_queries, cuts = num_queries // 4 + 1, [cut // 4 + 1 for cut in cuts]
    q, k, v = draw_inputs(num_queries, sum(cuts), 2, 2, 32, seed)
    k = torch.cat([part * growth**number for number, part in enumerate(k.split(cuts))])
    total = empty(q)
    for k_part, v_part in zip(k.split(cuts), v.split(cuts)):
        x86.attend(total, q, k_part, v_part, instructions=instructions)
    assert_close(result(total), exact(q, k, v, torch.ones(num_queries, sum(cuts), dtype=torch.bool)))


@pytest.mark.skipif(not has_tiles(), reason="needs a CPU with AMX")
@pytest.mark.parametrize("dim", [48, 64])
def test_tiles_give_the_bits_of_their_model(dim: int) -> None:
    q, k, v = draw_inputs(100, 100, 2, 3, dim, 6)
    tiles, model = empty(q), empty(q)
    x86.attend(tiles, q, k, v, is_causal=True, instructions="tiles")
    x86.attend(model, q, k, v, is_causal=True, instructions="model")
    assert all(map(torch.equal, tiles, model))


@here
def test_strided_inputs_and_slices_of_a_partial_are_read_and_written_in_place() -> None:
    q, k, v = draw_inputs(90, 90, 2, 3, 64, 1)
    total = empty(q)
    part = Partial(*(x[20:50] for x in total))
    flipped = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    x86.attend(part, *(x[20:50] for x in flipped), is_causal=True)
    assert_close(result(part), exact(q[20:50], k[20:50], v[20:50], torch.ones(30, 30).tril().bool()))
    assert (total.sum[:20] == 0).all()
    assert (total.sum[50:] == 0).all()


@here
@each
def test_several_threads_give_the_bits_of_one(instructions: Instructions) -> None:
    q, k, v = draw_inputs(*[100 if instructions == "model" else 300] * 2, 2, 2, 64, 2)
    before = torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outputs.append(empty(q))
            x86.attend(outputs[-1], q, k, v, is_causal=True, instructions=instructions)
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*outputs):
        torch.testing.assert_close(one, two, atol=0, rtol=0)


@here
@each
def test_scores_of_any_size_neither_overflow_nor_vanish(instructions: Instructions) -> None:
    q, k, v = draw_inputs(64, 64, 1, 1, 64, 3)
    for factor in (1e-30, 300.0, 1e5):
        large = (q * factor).bfloat16()
        total = empty(large)
        x86.attend(total, large, k, v, is_causal=True, instructions=instructions)
        assert_close(result(total), exact(large, k, v, torch.ones(64, 64).tril().bool()))


@here
def test_inputs_that_do_not_go_together_are_refused() -> None:
    q, k, v = draw_inputs(8, 8, 1, 2, 16, 4)
    with pytest.raises(ValueError, match="as many keys as queries"):
        x86.attend(empty(q), q, k[:4], v[:4], is_causal=True)
    with pytest.raises(ValueError, match="a window only with is_causal"):
        x86.attend(empty(q), q, k, v, window=Window(0, 2))
    with pytest.raises(ValueError, match=r"keys and values \[T, 1, 16\]"):
        x86.attend(empty(q), q, k, v[:4])
    with pytest.raises(ValueError, match="contiguous partial"):
        x86.attend(Partial(*(x[::2] for x in empty(q))), q[::2], k, v)


def test_other_dtypes_and_head_sizes_are_left_to_torch() -> None:
    q, k, _ = draw_inputs(8, 8, 1, 1, 20, 5)
    assert x86.fits_tiles(q, k) is False
    q, k, _ = draw_inputs(8, 8, 1, 1, 16, 5)
    assert x86.fits_tiles(q.double(), k.double()) is False
