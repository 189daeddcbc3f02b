"""State spaces over rows in chunks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import softplus

from kernels_ref.recurrent import ScanInputs, StateSpace
from tests.recurrent.steps import run_in_chunks

CHUNKS = st.lists(
    st.lists(st.one_of(st.integers(0, 1), st.integers(0, 70)), min_size=3, max_size=3), min_size=1, max_size=4
)
KIND = StateSpace(num_heads=4, num_groups=2, head_dim=3, state_dim=5, limits=(0.1, 2.0))


def parts_of(kind: StateSpace, text: torch.Tensor) -> list[torch.Tensor]:
    """x, b, c and steps of tokens ``[T, X]``, whose further numbers are of no use."""
    heads, groups = kind.num_heads, kind.num_groups
    shapes = [(heads, kind.head_dim), (groups, kind.state_dim), (groups, kind.state_dim), (heads, 1)]
    pieces = text.split(
        [*(number * size for number, size in shapes), text.shape[-1] - num_inputs(kind)], dim=-1
    )
    return [piece.unflatten(-1, shape) for piece, shape in zip(pieces, shapes)]


def num_inputs(kind: StateSpace) -> int:
    return kind.num_heads * (kind.head_dim + 1) + 2 * kind.num_groups * kind.state_dim


def decays(kind: StateSpace) -> torch.Tensor:
    return -torch.linspace(0.1, 3.0, kind.num_heads)


def inputs_of(kind: StateSpace, text: torch.Tensor) -> ScanInputs:
    x, b, c, step = parts_of(kind, text)
    return kind.inputs(x, step[..., 0], decays(kind), b, c)


def token_by_token(kind: StateSpace, text: torch.Tensor) -> torch.Tensor:
    """Outputs in float64, ``[T, H, P]``."""
    state = torch.zeros(kind.num_heads, *kind.matrix, dtype=torch.float64)
    repeats, outputs = kind.num_heads // kind.num_groups, []
    for x, b, c, step in zip(*parts_of(kind, text.double())):
        size = softplus(step[:, 0]).clamp(*kind.limits)
        b, c = (each.repeat_interleave(repeats, dim=0) for each in (b, c))
        decay = (size * decays(kind).double()).exp()
        state = state * decay[:, None, None] + torch.einsum("h,hp,hs->hps", size, x, b)
        outputs.append(torch.einsum("hps,hs->hp", state, c))
    return torch.stack(outputs)


@settings(max_examples=30, deadline=None)
@given(CHUNKS)
def test_any_chunks_give_what_a_row_gets_token_by_token(chunks: list[list[int]]) -> None:
    """States of rows are left over from earlier requests."""
    generator = torch.Generator().manual_seed(0)
    lengths = [sum(chunk[row] for chunk in chunks) for row in range(3)]
    texts = [torch.randn(length, num_inputs(KIND), generator=generator) for length in lengths]
    state = torch.randn(5, 4, 3, 5, generator=generator)
    untouched = state[3].clone()
    found = run_in_chunks(
        [KIND], texts, chunks, lambda step, x: KIND.attend(inputs_of(KIND, x), (state,), step)
    )
    for text, got in zip(texts, found):
        if len(text):
            torch.testing.assert_close(got.double(), token_by_token(KIND, text), rtol=1e-4, atol=1e-4)
    assert torch.equal(state[3], untouched)


def test_heads_are_in_groups_of_one_size() -> None:
    with pytest.raises(ValueError, match="got 3 heads in 2 groups"):
        StateSpace(num_heads=3, num_groups=2, head_dim=3, state_dim=5)
