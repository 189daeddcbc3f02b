"""State spaces over rows in chunks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import softplus

from kernels_ref.recurrent import ScanInputs, StateSpace
from tests.recurrent.steps import run_in_chunks

CHUNKS = st.lists(
    st.lists(st.one_of(st.integers(0, 1), st.integers(0, 70)), min_size=3, max_size=3), min_size=1, max_size=4
)
KIND = StateSpace(num_heads=4, num_groups=2, head_dim=3, state_dim=5, limits=(0.1, 2.0))
SIZE = 4 * 3 + 2 * 5 + 2 * 5 + 4
A = -torch.linspace(0.1, 3.0, 4)


def inputs_of(text: torch.Tensor) -> ScanInputs:
    x, b, c, step = text.split([12, 10, 10, 4], dim=-1)
    return KIND.inputs(x.unflatten(-1, (4, 3)), step, A, *(each.unflatten(-1, (2, 5)) for each in (b, c)))


def token_by_token(text: torch.Tensor) -> torch.Tensor:
    """In float64."""
    state, outputs = torch.zeros(4, 3, 5, dtype=torch.float64), []
    for token in text.double():
        x, b, c, step = token.split([12, 10, 10, 4])
        size = softplus(step).clamp(*KIND.limits)
        b, c = (each.view(2, 5).repeat_interleave(2, dim=0) for each in (b, c))
        new = torch.einsum("h,hp,hs->hps", size, x.view(4, 3), b)
        state = state * (size * A.double()).exp()[:, None, None] + new
        outputs.append(torch.einsum("hps,hs->hp", state, c))
    return torch.stack(outputs)


@given(CHUNKS)
def test_any_chunks_give_what_a_row_gets_token_by_token(chunks: list[list[int]]) -> None:
    """States of rows are left over from earlier requests."""
    generator = torch.Generator().manual_seed(0)
    lengths = [sum(chunk[row] for chunk in chunks) for row in range(3)]
    texts = [torch.randn(length, SIZE, generator=generator) for length in lengths]
    state = torch.randn(5, 4, 3, 5, generator=generator)
    untouched = state[3].clone()
    found = run_in_chunks([KIND], texts, chunks, lambda step, x: KIND.attend(inputs_of(x), (state,), step))
    for text, got in zip(texts, found):
        if len(text):
            torch.testing.assert_close(got.double(), token_by_token(text), rtol=1e-4, atol=1e-4)
    assert torch.equal(state[3], untouched)


def test_heads_are_in_groups_of_one_size() -> None:
    with pytest.raises(ValueError, match="got 3 heads in 2 groups"):
        StateSpace(num_heads=3, num_groups=2, head_dim=3, state_dim=5)
