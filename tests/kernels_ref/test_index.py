"""Places of new keys and values in the stores."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels_ref.units import UnitLayout, unit_places, write_indices


@given(
    places=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=9),
    kinds=st.sets(st.tuples(st.integers(1, 5), st.integers(0, 2), st.integers(0, 3), st.booleans())),
)
def test_each_token_and_head_has_the_place_of_its_vector_however_units_are_spread(
    places: list[tuple[int, int]], kinds: set[tuple[int, int, int, bool]]
) -> None:
    unit, slot = torch.tensor(places, dtype=torch.int32).T
    layouts = {
        UnitLayout(7, num_heads, 4, 4 + gap, num_heads * (4 + gap) + room, room if is_behind else 0)
        for num_heads, gap, room, is_behind in kinds
    }
    found = write_indices(unit, slot, layouts)
    assert found.keys() == layouts
    for layout, index in found.items():
        # A store that holds, at each place, which place it is.
        flat = torch.full((7 * layout.unit_stride, 3), -1)
        names = torch.stack(torch.meshgrid(*map(torch.arange, (7, layout.num_heads, 4)), indexing="ij"), -1)
        layout.view(flat).copy_(names)
        expected = [[[u, head, s] for head in range(layout.num_heads)] for u, s in places]
        assert flat[index].view(len(places), layout.num_heads, 3).tolist() == expected
        units = layout.view(flat).index_select(0, unit)
        assert flat[unit_places(unit, layout)].view(units.shape).equal(units)
