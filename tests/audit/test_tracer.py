"""The tracer against rules, hand counts and torch's own allocator."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hpu_duo.lab.audit import Engine, Severity, StepTracer, native_sources, peak_allocated_bytes
from hpu_duo.lab.audit.findings import TraceEnded
from hpu_duo.lab.audit.structure import make_hpu_known
from hpu_duo.lab.sim import Rule

Tensor = torch.Tensor


def on_hpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="hpu")


def traced(run: Callable[..., object], *tensors: Tensor) -> StepTracer:
    tracer = StepTracer(tensors)
    with torch.no_grad(), tracer:
        run(*tensors)
    return tracer


@pytest.fixture
def fake() -> FakeTensorMode:
    make_hpu_known()
    return FakeTensorMode()


@pytest.mark.parametrize(
    ("run", "rule"),
    [
        (lambda x, i: x.nonzero(), Rule.DYNAMIC_SHAPE),
        (lambda x, i: x.masked_select(x > 0), Rule.DYNAMIC_SHAPE),
        (lambda x, i: x[x > 0], Rule.BOOLEAN_INDEX),
        (lambda x, i: x.sum().item(), Rule.HOST_IN_GRAPH),
        (lambda x, i: 1 if x.sum() > 0 else 0, Rule.HOST_IN_GRAPH),
        (lambda x, i: x.cpu(), Rule.HOST_IN_GRAPH),
        (lambda x, i: x + torch.zeros(4, 8), Rule.MIXED_DEVICES),
        (lambda x, i: x.index_put((i,), x[0]), Rule.SCATTER),
        (lambda x, i: torch.arange(4, device="hpu"), Rule.WIDE_DTYPE),
        (lambda x, i: x.double(), Rule.WIDE_DTYPE),
        (lambda x, i: x[x[:, 0].argsort() + 0], Rule.WIDE_DTYPE),
        (lambda x, i: x[:2].add_(1), Rule.VIEW_WRITE),
        (lambda x, i: x.as_strided((2, 2), (8, 1)), Rule.AS_STRIDED),
        (lambda x, i: torch.rand_like(x), Rule.RANDOM_IN_GRAPH),
        (lambda x, i: nn.functional.dropout(x, 0.5), Rule.RANDOM_IN_GRAPH),
        (lambda x, i: torch.ones((), dtype=torch.float64, device="hpu"), Rule.WIDE_DTYPE),
        (lambda x, i: x.sum().double(), Rule.WIDE_DTYPE),
        (lambda x, i: x.half(), Rule.FLOAT_TYPE),
        (lambda x, i: x.bfloat16() @ x.t().bfloat16(), Rule.FLOAT_TYPE),
    ],
)
def test_what_the_simulated_device_refuses_is_found_without_data(
    fake: FakeTensorMode, run: Callable[..., object], rule: Rule
) -> None:
    with fake:
        tensors = (on_hpu(4, 8), on_hpu(2, dtype=torch.int32))
        tracer = StepTracer(tensors, weights=tensors[:1], model_dtype=torch.float32)
        try:
            with torch.no_grad(), tracer:
                run(*tensors)
        except TraceEnded:
            pass
    found = list(tracer.tally.findings.values())
    assert {finding.rule for finding in found} == {rule}
    assert {finding.severity for finding in found} == {Severity.FORBIDDEN}
    assert "test_tracer.py" in found[0].source


def test_what_is_no_product_with_a_weight_may_be_in_any_float_type(fake: FakeTensorMode) -> None:
    with fake:
        weight, x = on_hpu(8, 8, dtype=torch.bfloat16), on_hpu(4, 8, dtype=torch.bfloat16)
        tracer = StepTracer((weight, x), weights=(weight,), model_dtype=torch.bfloat16)
        with torch.no_grad(), tracer:
            scores = (x @ weight).float()
            (scores @ scores.t()).softmax(dim=-1).bfloat16() @ x
            weight.float().square().sum()
            x.new_ones(()) * 2.0
    assert not tracer.tally.findings


def test_int64_indices_that_an_operator_found_are_noted_where_they_are_read(fake: FakeTensorMode) -> None:
    with fake:
        x = on_hpu(4, 8)
        tracer = traced(lambda x: x[x.topk(2).indices.t().reshape(-1).clamp(max=3).to(torch.int32)], x)
        noted = traced(lambda x: x[:, 0][x[:, :4].topk(2).indices.t().reshape(-1)].exp(), x)
    (forbidden,) = tracer.tally.findings.values()
    assert "clamp" in forbidden.operator
    (note,) = noted.tally.findings.values()
    assert note.severity is Severity.NOTE
    assert note.rule is Rule.WIDE_DTYPE
    assert set(note.shown_by) <= set(native_sources())
    assert "(8,)" in note.detail
    assert noted.live_bytes == 0


def test_static_operators_break_no_rule(fake: FakeTensorMode) -> None:
    with fake:
        x, i = on_hpu(4, 8), on_hpu(2, dtype=torch.int32)
        tracer = traced(
            lambda x, i: x.index_copy_(0, i, torch.where(x > 0, x, 0.0).index_select(0, i)).softmax(-1), x, i
        )
    assert not tracer.tally.findings
    assert tracer.live_bytes == 0


def test_operations_and_bytes_are_those_of_the_definition(fake: FakeTensorMode) -> None:
    with fake:
        a, b, store, index = on_hpu(6, 8), on_hpu(8, 10), on_hpu(100, 10), on_hpu(6, dtype=torch.int32)
        tracer = traced(lambda a, b, s, i: s.index_copy_(0, i, (a @ b).exp()), a, b, store, index)
    work = tracer.tally.work
    assert work[Engine.MATRIX].num_operations == 2 * 6 * 8 * 10
    assert work[Engine.MATRIX].num_bytes == 4 * (6 * 8 + 8 * 10 + 6 * 10)
    assert work[Engine.VECTOR].num_operations == 6 * 10
    # The rows that are copied, read and written, and their numbers: not the whole store.
    assert work[Engine.MEMORY].num_bytes == 4 * (60 + 60 + 6)
    assert work[Engine.MEMORY].num_operations == 0


def test_a_repeated_part_counts_like_one_that_runs_again(fake: FakeTensorMode) -> None:
    def layer(x: Tensor) -> Tensor:
        return (x @ x.t()).exp() @ x

    with fake:
        x = on_hpu(16, 8)
        twice = traced(lambda x: layer(layer(x)), x)
        folded = StepTracer([x])
        with torch.no_grad(), folded:
            with folded.part() as part:
                once = layer(x)
            from hpu_duo.lab.audit.tracer import without_memory

            again = folded.repeat(part, without_memory(once))
    assert again.shape == x.shape
    assert folded.tally.operators == twice.tally.operators
    assert folded.tally.work == twice.tally.work
    assert folded.peak_bytes == twice.peak_bytes


OPERATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x * 2,
    lambda x: x.exp() + x,
    lambda x: x.t().contiguous().t(),
    lambda x: torch.cat([x, x])[: len(x)],
    lambda x: x[:, None].expand(-1, 3, -1).clone().sum(1),
    lambda x: x.clone().mul_(3),
    lambda x: x[None].squeeze(0),
)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from(range(len(OPERATIONS))), min_size=1, max_size=6), st.integers(8, 40))
def test_the_peak_is_what_the_allocator_hands_out(numbers: list[int], size: int) -> None:
    def run(x: Tensor) -> None:
        kept = [x]
        for number in numbers:
            kept = [kept[-1], OPERATIONS[number](kept[-1])]

    x = torch.ones(size, size)
    measured = peak_allocated_bytes(lambda: run(x))
    # A Python number is a tensor of a few bytes for a moment.
    assert 0 <= measured - traced(run, x).peak_bytes <= 32
