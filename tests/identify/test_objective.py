"""Losses, schedule and optimiser against PyTorch and the published formulas."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.lab.identify.objective import AdamState, LossForm, Schedule


def test_steps_are_those_of_adamw_without_decay() -> None:
    rng = np.random.default_rng(0)
    start = rng.random((3, 4)) * 0.5 + 0.25
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimiser = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.0)
    state = AdamState.initial(start)
    for step in range(12):
        gradient = rng.normal(size=start.shape)
        lr = 0.01 * (1 + step % 3)
        optimiser.param_groups[0]["lr"] = lr
        parameter.grad = torch.from_numpy(gradient)
        optimiser.step()
        state = state.stepped(gradient, lr)
    np.testing.assert_allclose(state.gates, parameter.detach().numpy(), rtol=1e-9)


@given(gradient=st.floats(-10, 10), lr=st.floats(1e-3, 1))
def test_gates_never_leave_zero_to_one(gradient: float, lr: float) -> None:
    state = AdamState.initial(np.array([[0.0, 0.5, 1.0]]))
    for _ in range(5):
        state = state.stepped(np.full((1, 3), gradient), lr)
        assert ((state.gates >= 0) & (state.gates <= 1)).all()


@pytest.mark.parametrize("num_steps", [1, 7, 100, 2000])
def test_the_schedule_is_the_published_one(num_steps: int) -> None:
    schedule = Schedule(0.02, num_steps)
    for s in range(num_steps):
        up = max((s + 1) / (num_steps / 5), 0.1)
        down = max((num_steps - s) / (num_steps / 5), 0.1)
        assert schedule.at(s) == pytest.approx(0.02 * min(1, up, down))


def test_mean_and_sum_differ_by_the_numbers_they_average_over() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 7, 16)
    mean, total = (form.distillation(student, teacher).item() for form in (LossForm.MEAN, LossForm.SUM))
    assert total == pytest.approx(mean * 7 * 16, rel=1e-5)


@pytest.mark.parametrize("form", LossForm)
def test_the_penalty_is_an_l1_over_layers_with_gates(form: LossForm) -> None:
    gates = np.array([[0.0, 0.5], [0.9, 1.0], [0.25, 0.0]])
    trained = np.array([True, False, True])
    shown = torch.tensor(gates[trained], requires_grad=True)
    expected = shown.abs().mean() if form is LossForm.MEAN else shown.abs().sum()
    expected.backward()
    value, slope = form.penalty(gates, trained)
    assert value == pytest.approx(expected.item())
    assert shown.grad is not None
    np.testing.assert_allclose(slope[trained], shown.grad.numpy())
    assert not slope[1].any()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [({"num_steps": 0}, "num_steps >= 1"), ({"lr": 0.0}, "lr > 0"), ({"ramp": 0.0}, r"ramp in \(0, 1\]")],
)
def test_schedules_that_go_nowhere_are_refused(fields: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Schedule(**fields)
