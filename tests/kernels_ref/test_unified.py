"""Unified attention against a dense double loop, over random mixes of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from bias_builders import Leading, Window
from kernels_ref import Implementation, Softmax, StepParts, unified_attention
from kernels_ref.chunks import ChunkBounds, Slices
from kernels_ref.sdpa import decode
from tests.kernels_ref.choices import ALL, CHOICES, ON_HPU, Choice
from tests.kernels_ref.scenario import TWO_SIZES, RowSpec, Scenario, World, scenarios
from tests.tiers import further

pytestmark = pytest.mark.instruction_set

QUICK = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])


def equals_dense(choice: Choice, scenario: Scenario) -> None:
    world = World(scenario)
    out = choice.attend(world)
    expected = world.dense()
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=2e-5)
    assert (out[len(expected) :] == 0).all(), "padded rows are zero"


@ALL
@QUICK
@given(scenario=scenarios(TWO_SIZES).filter(lambda s: s.kr + s.ks > 0))
@example(
    scenario=Scenario((RowSpec(9, 1), RowSpec(0, 9)), 4, Window(2, 3), 1, 1, 1, 8, (0, 0, 0, 0), False, 0)
)
def test_mixed_steps_equal_dense_attention_although_unused_slots_hold_nan(
    choice: Choice, scenario: Scenario
) -> None:
    equals_dense(choice, scenario)


@pytest.mark.slow
@pytest.mark.exhaustive
@ALL
@settings(QUICK, max_examples=300)
@given(scenario=scenarios(TWO_SIZES).filter(lambda s: s.kr + s.ks > 0))
def test_many_mixed_steps_equal_dense_attention(choice: Choice, scenario: Scenario) -> None:
    equals_dense(choice, scenario)


@ON_HPU
@pytest.mark.parametrize("softcap", [5.0, *further(50.0)])
@settings(QUICK, max_examples=8)
@given(scenario=scenarios(TWO_SIZES).filter(lambda s: s.kr + s.ks > 0))
def test_soft_caps_apply_to_the_scores_of_every_part(
    choice: Choice, softcap: float, scenario: Scenario
) -> None:
    world = World(scenario)
    out = choice.attend(world, softcap)
    expected = world.dense(softcap)
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=2e-5)


def test_fused_attention_refuses_a_soft_cap() -> None:
    world = World(Scenario((RowSpec(0, 4),), 4, Window(1, 2), 1, 0, 1, 8, (0, 0, 0, 0), False, 0))
    with pytest.raises(ValueError, match="no soft cap, got softcap=5"):
        CHOICES["sdpa"].attend(world, 5.0)


@ALL
@QUICK
@given(scenario=scenarios(TWO_SIZES).filter(lambda s: s.kr + s.ks > 0))
def test_sink_logits_enter_once_per_query(choice: Choice, scenario: Scenario) -> None:
    world = World(scenario)
    sinks = torch.randn(world.num_heads, generator=world.gen) * 2
    out = choice.attend(world, sinks=sinks)
    expected = world.dense(sinks=sinks)
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=2e-5)


@ALL
def test_long_rows_cross_slices_chunks_and_bands(choice: Choice) -> None:
    """Every loop of the kernels goes round several times, so that its borders are crossed."""
    bounds = ChunkBounds(score_bytes=4096, mask_bytes=2048, unique_bytes=1000)
    slices = Slices(8, 8, band_queries=8, context_blocks=2, decode_slots=3 * 4, short_blocks=2)
    rows = (
        RowSpec(41, 1),
        RowSpec(37, 30),
        RowSpec(0, 45),
        RowSpec(60, 1, 8),
        RowSpec(3, 20),
        RowSpec(55, 1),
    )
    for window in (Window(0, 5), Window(3, 11), Window(20, 4), Window(2, 70)):
        for kr, ks in ((1, 1), (2, 0), (0, 2)):
            world = World(Scenario(rows, 4, window, kr, ks, 2, 8, (3, 2, 2, 1), False, 7))
            expected = world.dense()
            out = choice.attend(world, slices=slices, chunks=bounds)[: len(expected)].double()
            torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@ON_HPU
@given(scenario=scenarios(TWO_SIZES).filter(lambda s: s.kr > 0))
@settings(QUICK, max_examples=10)
def test_one_pass_over_all_blocks_equals_many_chunks(choice: Choice, scenario: Scenario) -> None:
    one = choice.attend(World(scenario), chunks=ChunkBounds.of_hpu(1 << 36))
    many = choice.attend(World(scenario), chunks=ChunkBounds(score_bytes=4096, unique_bytes=1000))
    torch.testing.assert_close(one, many, atol=2e-5, rtol=2e-5)


@ALL
@pytest.mark.parametrize("length", [5, 200])
def test_one_row_alone_reads_its_blocks_in_a_run_or_scattered(choice: Choice, length: int) -> None:
    for seed in range(4):
        world = World(Scenario((RowSpec(length, 1),), 4, Window(2, 6), 1, 1, 3, 8, (0, 0, 0, 0), False, seed))
        expected = world.dense()
        torch.testing.assert_close(choice.attend(world).double(), expected, atol=2e-5, rtol=2e-5)


@ALL
@pytest.mark.parametrize("head_dim", [8, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_the_exact_result_of_the_same_inputs(
    choice: Choice, dtype: torch.dtype, head_dim: int
) -> None:
    rows = (RowSpec(40, 1), RowSpec(30, 12), RowSpec(0, 20))
    world = World(Scenario(rows, 8, Window(4, 8), 2, 2, 3, head_dim, (2, 1, 1, 1), False, 11), dtype)
    expected = world.dense()
    error = (choice.attend(world)[: len(expected)].double() - expected).abs()
    # Values are of size 1 and weights sum to 1: a few roundings of half an epsilon each.
    assert error.max() < 4 * torch.finfo(dtype).eps
    assert error.mean() < torch.finfo(dtype).eps / 2


@ON_HPU
@settings(QUICK, max_examples=20)
@given(scenario=scenarios(TWO_SIZES).filter(lambda s: s.kr + s.ks > 0))
def test_fast_softmax_stays_close_to_the_exact_one_and_hides_the_same(
    choice: Choice, scenario: Scenario
) -> None:
    """Scores are rounded to bfloat16, so weights are off by an epsilon of the largest score."""
    world = World(scenario, torch.bfloat16)
    out = choice.fast().attend(world, softmax=Softmax.FAST)
    expected = world.dense()
    assert (out[: len(expected)].double() - expected).abs().max() < 0.1
    assert (out[len(expected) :] == 0).all()


class Exponentials(TorchDispatchMode):
    """Collects the types of exponentials of scores; those of largest scores are as wide as a group."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group, self.dtypes = group, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func.overloadpacket in (torch.ops.aten.exp, torch.ops.aten.exp_)
            and args[0].shape[-1] > self.group
        ):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("softmax", "dtype"), [(Softmax.EXACT, torch.float32), (Softmax.FAST, torch.bfloat16)]
)
def test_fast_softmax_is_in_bfloat16(softmax: Softmax, dtype: torch.dtype) -> None:
    rows = (RowSpec(40, 1), RowSpec(30, 12), RowSpec(0, 20), RowSpec(41, 1, 2))
    world = World(Scenario(rows, 8, Window(4, 8), 1, 1, 3, 8, (2, 1, 1, 1), False, 11), torch.bfloat16)
    q, k, v, step = world.inputs()
    spec = world.spec(Implementation.REFERENCE, softmax=softmax)
    with Exponentials(group=3) as seen:
        unified_attention(q, k, v, world.cache, step, spec)
    assert seen.dtypes == {dtype}


@ALL
def test_what_padding_writes_into_trash_never_comes_back(choice: Choice) -> None:
    scenario = Scenario((RowSpec(5, 1), RowSpec(6, 4)), 4, Window(1, 3), 1, 1, 1, 8, (6, 2, 2, 2), True, 3)
    outputs = []
    for rubbish in (torch.nan, 0.0, 1e30):
        world = World(scenario)
        for units in world.cache:
            for view in units.views:
                view[-1] = rubbish
        outputs.append(choice.attend(world))
    torch.testing.assert_close(outputs[0], outputs[1], atol=0, rtol=0)
    torch.testing.assert_close(outputs[1], outputs[2], atol=0, rtol=0)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_fused_form_of_one_short_row_equals_dense_attention(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for length in (0, 3, 4, 21, 200):
        world = World(
            Scenario((RowSpec(length, 1),), 4, Window(2, 6), 1, 1, 3, 8, (0, 2, 3, 0), True, length)
        )
        assert decode.is_short(world.queries, Leading(torch.zeros(1, 1, 1)), 4) is True
        # All parts run: the fused operators of the other parts have nothing to do, and no soft cap.
        q, k, v, step = world.inputs()
        step = step._replace(parts=StepParts(causal=False, shared=False, unique=True))
        out = unified_attention(q, k, v, world.cache, step, world.spec(Implementation.SDPA, softcap))
        torch.testing.assert_close(out.double(), world.dense(softcap), atol=2e-5, rtol=2e-5)


def test_the_result_of_the_only_token_of_a_step_is_not_moved() -> None:
    world = World(Scenario((RowSpec(21, 1),), 4, Window(2, 6), 1, 1, 3, 8, (0, 0, 0, 0), True, 5))
    q, k, v, step = world.inputs()
    assert len(q) == 1
    step = step._replace(parts=StepParts(causal=False, shared=False, unique=True), keeps_rows=True)
    names = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    with Record():
        out = unified_attention(q, k, v, world.cache, step, world.spec(Implementation.SDPA))
    torch.testing.assert_close(out.double(), world.dense(), atol=2e-5, rtol=2e-5)
    assert "aten::constant_pad_nd" not in names


@ALL
def test_one_prompt_that_fills_the_step_is_attended_whole(choice: Choice) -> None:
    for window in (Window(2, 6), Window(0, 40)):
        world = World(Scenario((RowSpec(0, 33),), 4, window, 1, 1, 3, 8, (0, 0, 0, 1), False, 5))
        torch.testing.assert_close(choice.attend(world).double(), world.dense(), atol=2e-5, rtol=2e-5)
