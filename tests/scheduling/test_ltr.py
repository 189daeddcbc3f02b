"""Learned ranks: as good as their scores, and nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.scheduling import make_policy
from tests.scheduling.serving import ALONE, Serving

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def ends(policy: str, lengths: list[int], scores: list[float]) -> dict[str, int]:
    serving = Serving(policy, ALONE)
    for number, (length, score) in enumerate(zip(lengths, scores)):
        serving.add(str(number), length, score=score)
    return serving.finish().ends


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, scale=st.floats(0.01, 100), offset=st.floats(-100, 100))
def test_perfect_scores_give_the_shortest_job_first(lengths: list[int], scale: float, offset: float) -> None:
    """Any numbers in the order of the lengths are perfect."""
    scores = [length * scale + offset for length in lengths]
    assert ends("ltr:idle=inf", lengths, scores) == ends("sjf:patience=inf", lengths, scores)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, score=st.floats(-5, 5))
def test_constant_scores_give_first_come_first_served(lengths: list[int], score: float) -> None:
    assert ends("ltr", lengths, [score] * len(lengths)) == ends("fcfs", lengths, [0.0] * len(lengths))


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, idle=st.integers(1, 9), data=st.data())
def test_nobody_waits_for_longer_than_idle_steps_and_those_who_were_promoted_before(
    lengths: list[int], idle: int, data: st.DataObject
) -> None:
    """Promoted requests run to the end, one after the other, in the order of scores."""
    scores = data.draw(st.lists(st.floats(-1, 1), min_size=len(lengths), max_size=len(lengths)))
    serving = Serving(f"ltr:idle={idle},period=1000", ALONE)
    serving.add("victim", 1, score=1e9)
    for number, (length, score) in enumerate(zip(lengths, scores)):
        serving.add(str(number), length, score=score)
    serving.finish()
    assert serving.ends["victim"] <= idle + sum(lengths) + 1


def test_a_stream_of_low_scores_does_not_starve_a_high_one() -> None:
    serving = Serving("ltr:idle=10,period=3", ALONE)
    serving.add("high", 3, score=9.0)
    for number in range(40):
        serving.add(f"low{number}", 2, score=0.0)
        serving.step()
    assert serving.ends["high"] <= 10 + 2 + 3


def test_a_promoted_request_is_displaced_again_after_its_period() -> None:
    serving = Serving("ltr:idle=4,period=2", ALONE)
    serving.add("high", 6, score=9.0)
    served = []
    for number in range(9):
        serving.add(f"low{number}", 1, score=0.0)
        served.append(serving.step()[0])
    high = [step for step, name in enumerate(served) if name == "high"]
    assert high[:2] == [3, 4]
    assert served[5].startswith("low")


@pytest.mark.parametrize("option", ["idle=0", "period=0", "idle=nan"])
def test_options_below_one_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match="to be 1 or more, got"):
        make_policy(f"ltr:{option}")
