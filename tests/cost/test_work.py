"""Bytes and operations against plain counting, and how they grow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.kv.plan import MemoryPlan, widest_row
from hpu_duo.planning import (
    FITTED,
    GAUDI2,
    GAUDI3,
    PUBLISHED_LAYER_LAUNCHES,
    Efficiency,
    Format,
    Formats,
    Hardware,
    ModelSize,
    Step,
    Work,
    find_hardware,
    predict_seconds,
    step_work,
)
from tests.cost.sizes import models, tiny

STEPS = st.builds(
    Step, num_rows=st.integers(1, 40), context=st.integers(0, 2000), new_tokens=st.integers(1, 300)
)
WINDOWS = st.none() | st.integers(1, 500)
SPARSITIES = st.sampled_from((0.0, 0.25, 0.5, 0.75, 1.0))
KV_FORMATS = st.sampled_from((Format.BF16, Format.FP8))
FORMATS = st.builds(Formats, st.sampled_from(Format), KV_FORMATS)


def work_of(model: ModelSize, step: Step, sparsity: float = 0.0, formats: Formats | None = None) -> Work:
    return step_work(model, model.kv_layers(sparsity, 16, 48, 4000), formats or Formats(), step)


@given(STEPS, WINDOWS)
def test_scores_and_keys_are_those_counted_token_by_token(step: Step, window: int | None) -> None:
    positions = range(step.context, step.context + step.new_tokens)
    seen = [
        range(0 if window is None else max(0, position - window + 1), position + 1) for position in positions
    ]
    assert step.scores(window) == sum(map(len, seen))
    assert step.keys(window) == max(map(max, seen)) - min(map(min, seen)) + 1


@given(models(), st.integers(1, 20), st.integers(1, 3000), SPARSITIES, KV_FORMATS)
def test_a_decode_step_reads_the_bytes_that_the_memory_plan_holds(
    model: ModelSize, num_rows: int, context: int, sparsity: float, kv: Format
) -> None:
    """With blocks of one token and full rings, every byte held is read once per step."""
    layers = model.kv_layers(sparsity, 16, 48, 4000)
    longest_ring = widest_row(group for layer in layers for group in layer.groups)
    context += longest_ring
    plan = MemoryPlan(layers, kv.num_bytes, block_size=1, max_num_seqs=1, num_blocks=1)
    work = step_work(model, layers, Formats(kv=kv), Step(num_rows, context - 1))
    assert work.kv_bytes == num_rows * plan.bytes_per_request(context)


def test_operations_of_a_tiny_model_are_those_counted_by_hand() -> None:
    model = tiny(num_layers=2)
    work = work_of(model, Step(num_rows=3, context=10, new_tokens=2))
    scores = 3 * 2 * 4 * (11 + 12)
    assert work.bf16_ops == 2 * 6 * 7000 + 2 * 3 * 32 * 96 + scores * 2 * 16
    assert work.fp8_ops == 0
    assert work.vector_ops == 15 * scores
    assert work.weight_bytes == 2 * 7000 + 2 * 32 * 96
    assert work.kv_bytes == 3 * 2 * 2 * 12 * 16 * 2
    assert work.reduced_bytes == 2 * 2 * 6 * 32 * 2
    assert work.num_launches == 2 * PUBLISHED_LAYER_LAUNCHES


def test_fp8_moves_only_what_is_stored_in_it() -> None:
    step = Step(num_rows=3, context=10)
    plain = work_of(tiny(), step)
    weights = work_of(tiny(), step, formats=Formats(weights=Format.FP8))
    cache = work_of(tiny(), step, formats=Formats(kv=Format.FP8))
    assert plain.weight_bytes - weights.weight_bytes == 7000
    assert weights.fp8_ops == 2 * 3 * 7000
    assert weights.kv_bytes == plain.kv_bytes
    assert cache.kv_bytes == plain.kv_bytes / 2
    assert cache.weight_bytes == plain.weight_bytes
    assert cache.bf16_ops + cache.fp8_ops == plain.bf16_ops


@given(models(), STEPS, SPARSITIES, FORMATS, st.sampled_from((GAUDI2, GAUDI3)))
def test_more_rows_tokens_context_or_full_heads_never_take_less_time(
    model: ModelSize, step: Step, sparsity: float, formats: Formats, hardware: Hardware
) -> None:
    def seconds(changed: Step, share: float = sparsity) -> float:
        work = work_of(model, changed, share, formats)
        return predict_seconds(work, hardware, 1, FITTED).total

    least = seconds(step)
    assert seconds(Step(step.num_rows + 1, step.context, step.new_tokens)) > least
    assert seconds(Step(step.num_rows, step.context, step.new_tokens + 1)) > least
    assert seconds(Step(step.num_rows, step.context + 1, step.new_tokens)) >= least
    assert seconds(step, max(0.0, sparsity - 0.25)) >= least * (1 - 1e-12)


@given(models(), STEPS)
def test_work_is_additive_and_scales(model: ModelSize, step: Step) -> None:
    work = work_of(model, step)
    assert work + work == work * 2
    assert work + Work() == work


def test_several_devices_share_the_work_and_pay_for_the_link() -> None:
    work = Work(bf16_ops=1e12, weight_bytes=1e9, reduced_bytes=1e9, num_launches=10)
    alone = predict_seconds(work, GAUDI2, 1, FITTED)
    shared = predict_seconds(work, GAUDI2, 4, FITTED)
    assert alone.link == 0
    assert shared.compute == pytest.approx(alone.compute / 4)
    assert shared.memory == pytest.approx(alone.memory / 4)
    assert shared.launch == alone.launch
    # Each device sends 2 * 3 / 4 of the bytes over three links of 37.5 GB/s.
    assert shared.link == pytest.approx(2 * 3 / 4 * 1e9 / (3 * 37.5e9) / FITTED.link)


def test_impossible_steps_efficiencies_and_hardware_are_refused() -> None:
    with pytest.raises(ValueError, match="num_rows >= 1"):
        Step(0, 5)
    with pytest.raises(ValueError, match="expected compute above 0 and at most 1, got"):
        Efficiency(1.5, 0.5, 0.5, 0.0)
    with pytest.raises(ValueError, match="expected launch_s >= 0"):
        Efficiency(0.5, 0.5, 0.5, -1.0)
    with pytest.raises(ValueError, match="expected 1 to 8 Gaudi 3 devices, got 9"):
        predict_seconds(Work(), GAUDI3, 9, FITTED)
    with pytest.raises(ValueError, match="gaudi2 or gaudi3, got 'gaudi'"):
        find_hardware("gaudi")
    with pytest.raises(ValueError, match="expected 2 KV layers, got 1"):
        step_work(tiny(), tiny().kv_layers(0.0, 0, 1, 10)[:1], Formats(), Step(1, 0))


@pytest.mark.parametrize("hardware", [GAUDI2, GAUDI3])
def test_roofs_are_never_above_what_the_vendor_states(hardware: Hardware) -> None:
    assert hardware.reached_bf16 < hardware.nominal_bf16
    assert hardware.reached_fp8 < hardware.nominal_fp8
    assert hardware.sources
