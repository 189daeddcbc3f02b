"""Steps over stored latents against dense attention over the keys and values of each head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from bias_builders import Window
from kernels_ref import HeadGroup, KVUnits, LatentBlocks, LatentKV, LatentRings, LatentSize, UnitLayout
from kernels_ref.chunks import Slices
from kernels_ref.formats import LATENT
from kernels_ref.units import Encoding, units_of
from tests.kernels_ref.choices import ALL, Choice
from tests.kernels_ref.scenario import TWO_SIZES, RowSpec, Scenario, World, scenarios

pytestmark = pytest.mark.instruction_set

LATENTS = LatentSize(6, 3)
QUICK = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])


class LatentWorld(World):
    """A scenario whose stores have latents; ``keys`` and ``values`` are those that they expand to.

    Each key/value head has one query head, whatever the scenario says.
    """

    def _history(self, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        s = self.s
        key_dim, value_dim = s.dims
        self.num_heads = num_heads = s.kr + s.ks
        sizes = (num_heads, key_dim - LATENTS.rotary, LATENTS.rank), (num_heads, value_dim, LATENTS.rank)
        self.weights = tuple((torch.randn(x, generator=self.gen) / 2).to(dtype) for x in sizes)
        lengths = [row.start + row.num_new for row in s.rows]
        drawn = [torch.randn(num, 1, LATENTS.size, generator=self.gen).to(dtype) for num in lengths]
        for number, table in enumerate(self.tables):
            same = 0
            while (
                number and same < min(len(table), len(self.tables[0])) and table[same] == self.tables[0][same]
            ):
                same += 1
            drawn[number][: same * s.block_size] = drawn[0][: same * s.block_size]
        self.latents = drawn
        expanded = [self.new_latents(x).expanded() for x in drawn]
        return [each.k for each in expanded], [each.v for each in expanded]

    def new_latents(self, latent: torch.Tensor) -> LatentKV:
        return LatentKV(latent, *self.weights)

    def _stores(self, dtype: torch.dtype) -> tuple[KVUnits, KVUnits]:
        s = self.s
        blocks = self._units(self.num_blocks + 1, 1, s.block_size, dtype)
        rings = self._units(self.max_rows + 1, 1, s.window.size + s.slack, dtype, len(s.rows) + 1)
        turning = s.window.recent + s.slack
        for number, row in enumerate(s.rows):
            table, ring, latents = self.tables[number], int(self.rows.row_id[number]), self.latents[number]
            for p in range(row.start + row.ahead):
                vector = latents[p] if p < row.start else -2 * latents[p % len(latents)]
                if s.kr and p // s.block_size < len(table):
                    blocks.views[0][table[p // s.block_size], :, p % s.block_size] = vector
                slot = p if p < s.window.sink else s.window.sink + (p - s.window.sink) % turning
                rings.views[0][ring, :, slot] = vector
        return blocks, rings

    def _units(
        self, num_units: int, num_heads: int, num_slots: int, dtype: torch.dtype, copied: int = 0
    ) -> KVUnits:
        layout = UnitLayout.dense(num_units, 1, num_slots)
        store = torch.full((num_units * num_slots, LATENTS.size), torch.nan, dtype=dtype)
        units = units_of((store,), layout, Encoding(LATENT, LATENTS.size, LATENTS.rank, dtype))
        scratch = torch.full((copied, 1, num_slots, LATENTS.size), torch.nan, dtype=dtype)
        return units._replace(scratch=(scratch,)) if copied else units

    def inputs(self, has_masks: bool = False) -> Any:
        s = self.s
        kinds = (s.kr, LatentBlocks(s.rule, LATENTS)), (s.ks, LatentRings(s.window, s.slack, LATENTS))
        self.groups = tuple(HeadGroup(count, kind) for count, kind in kinds if count)
        q, _, _, step = super().inputs(has_masks)
        return q, self.new_latents(self.new(self.latents, s.pad[0])), None, step


def latent_scenarios() -> Any:
    return scenarios(TWO_SIZES).filter(lambda s: s.kr + s.ks > 0 and s.group == 1)


@ALL
@QUICK
@given(scenario=latent_scenarios())
@example(
    scenario=Scenario((RowSpec(9, 1), RowSpec(0, 9)), 4, Window(2, 3), 1, 1, 1, 8, (0, 0, 0, 0), False, 0)
)
@example(scenario=Scenario((RowSpec(41, 1),), 4, Window(2, 3), 3, 0, 1, 8, (0, 0, 0, 0), False, 0))
def test_absorbed_and_expanded_parts_equal_dense_attention(choice: Choice, scenario: Scenario) -> None:
    world = LatentWorld(scenario)
    out = choice.attend(world, slices=Slices(8, 8, decode_slots=12, short_blocks=2))
    expected = world.dense()
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=2e-5)
    assert (out[len(expected) :] == 0).all(), "padded rows are zero"
