"""The sample of shapes: bounded, uniform, and the same for the same steps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import BatchShape, Phase
from graphs.table import ShapeReservoir


def step(number: int) -> BatchShape:
    return BatchShape(Phase.parse("--u"), number + 1, 0, 0, 1)


def sample(num_steps: int, capacity: int, seed: int = 0) -> dict[BatchShape, int]:
    reservoir = ShapeReservoir(capacity, seed)
    for number in range(num_steps):
        reservoir.add(step(number))
    assert reservoir.num_steps == num_steps
    return reservoir.counts()


@given(st.integers(0, 400), st.integers(1, 60))
def test_a_sample_holds_every_step_or_as_many_as_it_may(num_steps: int, capacity: int) -> None:
    found = sample(num_steps, capacity)
    assert sum(found.values()) == min(num_steps, capacity)
    assert set(found) <= {step(number) for number in range(num_steps)}
    assert found == sample(num_steps, capacity)


@pytest.mark.slow
@pytest.mark.parametrize(("num_steps", "capacity"), [(11, 10), (40, 10), (200, 3)])
def test_every_step_is_as_likely_in_the_sample_as_another(num_steps: int, capacity: int) -> None:
    trials = 2000
    found: Counter[BatchShape] = Counter()
    for seed in range(trials):
        found.update(sample(num_steps, capacity, seed))
    share = capacity / num_steps
    # Five standard deviations of a count of independent samples.
    bound = 5 * (trials * share * (1 - share)) ** 0.5
    assert all(abs(found[step(number)] - trials * share) <= bound for number in range(num_steps))


def test_a_step_is_counted_as_often_as_it_occurs() -> None:
    reservoir = ShapeReservoir(100)
    for number in (1, 2, 1, 1):
        reservoir.add(step(number))
    assert reservoir.counts() == {step(1): 3, step(2): 1}


def test_an_empty_reservoir_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 shape, got 0"):
        ShapeReservoir(0)
