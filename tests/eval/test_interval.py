"""Wilson's interval against its definition: the shares that the score test does not reject."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.lab.eval.interval import interval_fields, wilson

Z = 1.959964


def end_of_accepted(share: float, count: int, outside: float) -> float:
    """Bisect for the share that the score test just accepts, between ``share`` and ``outside``."""
    inside = share
    for _ in range(80):
        middle = (inside + outside) / 2
        is_accepted = abs(share - middle) <= Z * math.sqrt(middle * (1 - middle) / count)
        inside, outside = (middle, outside) if is_accepted else (inside, middle)
    return inside


@given(count=st.integers(1, 5000), right=st.floats(0, 1))
def test_the_interval_holds_the_shares_that_the_score_test_accepts(count: int, right: float) -> None:
    low, high = wilson(right, count)
    assert low == pytest.approx(end_of_accepted(right, count, 0.0), abs=1e-6)
    assert high == pytest.approx(end_of_accepted(right, count, 1.0), abs=1e-6)
    assert 0.0 <= low <= right <= high <= 1.0


def test_known_intervals() -> None:
    """Numbers of Newcombe 1998, doi:10.1002/(SICI)1097-0258(19980430)17:8<857::AID-SIM777>3.0.CO;2-E."""
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1 / 29, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_a_share_stands_between_the_ends_of_its_interval() -> None:
    fields = interval_fields("accuracy", 0.5, 4)
    assert list(fields) == ["accuracy", "accuracy_low", "accuracy_high"]
    assert fields["accuracy_low"] < fields["accuracy"] < fields["accuracy_high"]


@pytest.mark.parametrize(("share", "count"), [(0.5, 0), (1.1, 4), (-0.1, 4)])
def test_shares_of_nothing_are_refused(share: float, count: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        wilson(share, count)
