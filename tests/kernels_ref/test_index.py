"""Where new keys and values are written."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels_ref.index import write_indices


@given(
    places=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=9),
    head_counts=st.sets(st.integers(1, 5)),
)
def test_each_token_and_head_has_the_index_of_its_vector(
    places: list[tuple[int, int]], head_counts: set[int]
) -> None:
    unit, slot = torch.tensor(places, dtype=torch.int32).T
    found = write_indices(unit, slot, head_counts, num_slots=4)
    assert found.keys() == head_counts
    for num_heads, index in found.items():
        # A store that holds, at each place, which place it is.
        store = torch.stack(torch.meshgrid(*map(torch.arange, (7, num_heads, 4)), indexing="ij"), dim=-1)
        expected = [[[u, head, s] for head in range(num_heads)] for u, s in places]
        assert store.view(-1, 3)[index].view(len(places), num_heads, 3).tolist() == expected
