"""Loops outside of compiled layers compute what the layers would, with bodies of few sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from bias_builders import Window
from graphs import BatchShape, Phase
from graphs.backends.compile import cutting
from hpu_duo.lab.sim import fused
from hpu_duo.planning.attention_counts import GroupSizes, count_attention
from hpu_duo.planning.region_calls import cut_loops, num_region_calls
from kernels_ref import loops, unified_attention
from kernels_ref.chunks import MOST_INLINE, ChunkBounds, Slices
from kernels_ref.loops import How
from tests.kernels_ref.choices import GAUDI2, GAUDI3, PORTABLE, Choice
from tests.kernels_ref.scenario import TWO_SIZES, RowSpec, Scenario, World, scenarios
from tests.kernels_ref.test_unified import QUICK
from tests.tiers import crossed

pytestmark = pytest.mark.instruction_set

ON_HPU = pytest.mark.parametrize("choice", PORTABLE.values(), ids=PORTABLE)
SLICES = Slices(8, 8)
LOOPED = ChunkBounds(score_bytes=4096, mask_bytes=2048, unique_bytes=1000, key_slots=12, most_inline=1)


@pytest.fixture(autouse=True)
def _as_if_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops are operators where a compiler traces a layer; here they are called as they are."""
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)


class Calls:
    """Counts the bodies of loops by what would be compiled: a device compiles anew for views at other places.

    Attributes:
        counts: calls by name, parameters, and the layout and place of every tensor.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, How, Hashable]] = Counter()

    def region_of(self, key: Hashable, body: Callable[..., Any]) -> Callable[..., Any]:
        def run(how: How, *tensors: Tensor) -> Any:
            places = tuple((x.shape, x.stride(), x.dtype, x.storage_offset()) for x in tensors)
            self.counts[body.__name__, how, places] += 1
            return body(how, *tensors)

        return run

    @property
    def names(self) -> set[str]:
        return {name for name, _, _ in self.counts}

    def of(self, name: str) -> int:
        """Calls of a body, which must have been compiled once for each group of heads."""
        found = [(how, count) for (each, how, _), count in self.counts.items() if each == name]
        times = Counter(how for how, _ in found)
        assert set(times.values()) <= {1}, f"{name} is compiled {list(times.values())} times"
        return sum(count for _, count in found)


@pytest.mark.slow
@ON_HPU
@settings(QUICK, max_examples=40)
@given(scenario=scenarios(TWO_SIZES).filter(lambda s: s.kr + s.ks > 0))
def test_loops_equal_dense_attention(choice: Choice, scenario: Scenario) -> None:
    world = World(scenario)
    expected = world.dense()
    out = choice.attend(world, slices=Slices(3, 3), chunks=LOOPED)[: len(expected)].double()
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@ON_HPU
def test_long_rows_go_round_every_loop(choice: Choice) -> None:
    rows = (
        RowSpec(41, 1),
        RowSpec(37, 30),
        RowSpec(0, 45),
        RowSpec(60, 1, 8),
        RowSpec(3, 20),
        RowSpec(55, 1),
    )
    for window in (Window(0, 5), Window(3, 11), Window(20, 4), Window(2, 70)):
        world = World(Scenario(rows, 4, window, 1, 1, 2, 8, (3, 2, 2, 1), False, 7))
        expected, calls = world.dense(), Calls()
        with loops.in_regions(calls.region_of):
            out = choice.attend(world, slices=SLICES, chunks=LOOPED)[: len(expected)].double()
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
        names = {"own_keys", "shared_chunk", "rings", "unique_chunk"}
        assert names <= calls.names <= {*names, "sinks_before"}
        assert ("sinks_before" in calls.names) is (window.sink > 0 and window.recent < 90)
        assert all(calls.of(name) > 2 for name in calls.names - {"sinks_before"})


@pytest.mark.parametrize("window", [Window(0, 5), Window(3, 11), Window(20, 4), Window(2, 70)])
@pytest.mark.parametrize("choice", [GAUDI2, GAUDI3], ids=["gaudi2", "gaudi3"])
def test_prompts_have_no_loops_where_masks_of_fused_attention_fit(choice: Choice, window: Window) -> None:
    rows = (RowSpec(41, 1), RowSpec(37, 30), RowSpec(0, 45), RowSpec(60, 1, 8), RowSpec(3, 20))
    world = World(Scenario(rows, 4, window, 1, 1, 2, 8, (3, 2, 2, 1), False, 7))
    expected, calls = world.dense(), Calls()
    with loops.in_regions(calls.region_of):
        out = choice.attend(world, slices=SLICES, chunks=LOOPED._replace(mask_bytes=1 << 20))
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=2e-5)
    assert calls.names == {"shared_chunk", "unique_chunk"}


@ON_HPU
def test_soft_caps_reach_the_bodies(choice: Choice) -> None:
    rows = (RowSpec(41, 1), RowSpec(37, 30), RowSpec(60, 1, 8))
    world = World(Scenario(rows, 4, Window(3, 11), 1, 1, 2, 8, (3, 2, 2, 1), False, 7))
    expected = world.dense(2.5)
    out = choice.attend(world, 2.5, slices=SLICES, chunks=LOOPED)[: len(expected)].double()
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@ON_HPU
def test_blocks_of_one_pass_are_read_in_place_by_one_call(choice: Choice) -> None:
    rows = (RowSpec(41, 1), RowSpec(37, 30), RowSpec(300, 1))
    one = LOOPED._replace(unique_bytes=1 << 30, one_pass=True)
    for most_inline, times in ((0, 1), (2, 0)):
        world = World(Scenario(rows, 4, Window(3, 11), 2, 0, 2, 8, (3, 2, 2, 1), False, 7))
        expected, calls = world.dense(), Calls()
        # With new keys a layer is cut before its decodes; without them it is not, if chunks are few.
        with loops.in_regions(calls.region_of):
            out = choice.attend(world, slices=SLICES, chunks=one._replace(most_inline=most_inline))
        torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=2e-5)
        assert calls.of("unique_chunk") == times


@ON_HPU
@pytest.mark.parametrize(("size", "is_cut"), [(64, False), (20, True)])
def test_rings_of_one_slice_are_read_in_the_graph(choice: Choice, size: int, is_cut: bool) -> None:
    rows = (RowSpec(41, 1), RowSpec(37, 30), RowSpec(60, 1, 8))
    world = World(Scenario(rows, 4, Window(3, 11), 1, 1, 2, 8, (3, 2, 2, 1), False, 7))
    expected, calls, chunks = world.dense(), Calls(), LOOPED._replace(most_inline=MOST_INLINE)
    with loops.in_regions(calls.region_of):
        out = choice.attend(world, slices=Slices(size, size), chunks=chunks)
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=2e-5)
    assert ("rings" in calls.names) is is_cut
    assert "shared_chunk" in calls.names


@ON_HPU
@pytest.mark.parametrize("bounds", [LOOPED, LOOPED._replace(unique_bytes=1 << 30, one_pass=True)])
def test_the_cost_model_counts_the_rounds_of_loops(choice: Choice, bounds: ChunkBounds) -> None:
    rows = (RowSpec(61, 1), RowSpec(37, 30), RowSpec(60, 1, 8))
    # Masks of float32, as here, are larger than those that the cost model is for.
    bounds = bounds._replace(most_inline=MOST_INLINE, mask_bytes=1 << 20)
    world, calls = World(Scenario(rows, 4, Window(3, 11), 2, 0, 2, 8, (3, 2, 2, 1), False, 7)), Calls()
    with loops.in_regions(calls.region_of):
        choice.attend(world, chunks=bounds)
    q, _, _, step = world.inputs()
    t, spec = step.tensors, replace(world.spec(choice.impl), chunks=bounds)
    bucket = BatchShape(
        Phase(True, True, True), len(q), len(t.shared_block), len(t.owner), t.tail_start.shape[0]
    )
    (sizes,) = GroupSizes.of_layer(spec, 4, 1, step.decode_len)
    runs = count_attention(sizes, bucket)[1]
    counted = calls.of("shared_chunk") + calls.of("unique_chunk")
    assert num_region_calls(sizes, bucket, runs) == counted + len(cut_loops(sizes, runs, bucket.phase)) > 1


@ON_HPU
def test_a_body_is_compiled_once_after_any_context(choice: Choice) -> None:
    def calls_after(length: int) -> dict[str, int]:
        rows = (RowSpec(length, 1), RowSpec(length, 61))
        world, calls = World(Scenario(rows, 4, Window(2, 6), 1, 1, 2, 8, (3, 1, 1, 0), False, 3)), Calls()
        with loops.in_regions(calls.region_of):
            choice.attend(world, slices=SLICES, chunks=LOOPED)
        return {name: calls.of(name) for name in calls.names}

    short, long = calls_after(60), calls_after(600)
    assert short.keys() == long.keys()
    for name in ("shared_chunk", "unique_chunk"):
        assert long[name] > 4 * short[name] > 4
    for name in ("own_keys", "sinks_before", "rings"):
        assert long[name] == short[name] > 1


@pytest.mark.parametrize(("choice", "most_inline"), crossed(PORTABLE, [0, 1, 2]))
def test_a_cut_layer_equals_the_layer(
    choice: Choice, most_inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    fused.register()
    rows = (RowSpec(41, 1), RowSpec(37, 30), RowSpec(60, 1, 8))
    scenario = Scenario(rows, 4, Window(3, 11), 1, 1, 2, 8, (3, 2, 2, 1), False, 7)
    world = World(scenario)
    expected = world.dense()
    q, k, v, step = world.inputs()
    sizes = {"slices": SLICES, "chunks": LOOPED._replace(most_inline=most_inline)}
    spec = replace(world.spec(choice.impl), operators=choice.operators, **sizes)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return unified_attention(q * 2, k, v, world.cache, step, spec) * 2  # type: ignore[arg-type]

    torch._dynamo.reset()
    with fused.named(choice.device), torch.no_grad():
        out = torch.compile(layer, backend=cutting("eager"), fullgraph=True)(q / 2, k, v) / 2
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=2e-5)
