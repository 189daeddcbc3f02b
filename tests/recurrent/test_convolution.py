"""Convolutions over time, with states of rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import conv1d

from kernels_ref import Convolution
from kernels_ref.recurrent import causal_convolution
from tests.recurrent.steps import run_in_chunks

CHUNKS = st.lists(st.lists(st.integers(0, 17), min_size=3, max_size=3), min_size=1, max_size=5)


@given(CHUNKS, st.integers(2, 5), st.booleans())
def test_any_chunks_give_what_a_row_gets_alone(chunks: list[list[int]], size: int, is_clean: bool) -> None:
    """States of rows are left over from earlier requests."""
    kind = Convolution(4, size, torch.float32)
    generator = torch.Generator().manual_seed(size)
    lengths = [sum(chunk[row] for chunk in chunks) for row in range(3)]
    texts = [torch.randn(length, 4, generator=generator) for length in lengths]
    weight, bias = torch.randn(4, size, generator=generator), torch.randn(4, generator=generator)
    state = torch.zeros(5, size - 1, 4) if is_clean else torch.randn(5, size - 1, 4, generator=generator)
    untouched = state[3].clone()
    found = run_in_chunks(
        [kind],
        texts,
        chunks,
        lambda step, x: causal_convolution(kind.windows(x, state, step), weight, bias),
    )
    for text, got in zip(texts, found):
        if len(text):
            expected = conv1d(text.t()[None], weight[:, None], bias, padding=size - 1, groups=4)
            torch.testing.assert_close(got, expected[0, :, : len(text)].t())
    assert torch.equal(state[3], untouched)


def test_a_convolution_reads_earlier_inputs() -> None:
    with pytest.raises(ValueError, match=r"expected a convolution of .* 2 inputs at least, got 4 and 1"):
        Convolution(4, 1, torch.float32)
