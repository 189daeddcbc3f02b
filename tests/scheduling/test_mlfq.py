"""Levels of feedback: who goes down, who comes up, and how long anybody waits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.request import Request, RequestStatus
from hpu_duo.scheduling import MultiLevelFeedback, make_policy
from tests.scheduling.serving import ALONE, Serving


@pytest.mark.parametrize(("prompt", "level"), [(1, 0), (7, 0), (8, 1), (15, 1), (16, 2), (31, 2), (32, 3)])
def test_a_request_begins_on_the_level_that_holds_its_prompt_and_one_token(prompt: int, level: int) -> None:
    policy = MultiLevelFeedback(quantum=8)
    serving = Serving(policy)
    request = serving.add("r", 20, prompt=prompt)
    assert policy.level(request) == level
    serving.step()
    # The prompt and its first token use up the quantum only if they fill it.
    assert policy.level(request) == level + (prompt + 1 == 8 << level)


def test_service_is_computed_and_sampled_tokens_and_each_level_grants_twice_the_last() -> None:
    policy = MultiLevelFeedback(quantum=4)
    serving = Serving(policy)
    request = serving.add("r", 30)
    levels = []
    for _ in range(16):
        serving.step()
        levels.append(policy.level(request))
    assert levels == [0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3]


def test_a_request_of_an_upper_level_displaces_one_of_a_lower_and_never_one_of_its_own() -> None:
    serving = Serving("mlfq:quantum=8", ALONE)
    serving.add("long", 40)
    served = [serving.step() for _ in range(3)]
    serving.add("short", 3)
    served += [serving.step() for _ in range(5)]
    assert [names[0] for names in served] == ["long"] * 4 + ["short"] * 3 + ["long"]


def test_tokens_that_are_computed_again_do_not_count() -> None:
    policy = MultiLevelFeedback(quantum=64)
    serving = Serving(policy, ALONE)
    long = serving.add("long", 40, prompt=20)
    serving.step()
    serving.scheduler.plan()
    serving.scheduler.discard()
    for _ in range(20):
        serving.step()
    assert policy.level(long) == 0
    serving.step()  # 20 + 1 and 21 times 2 are 63
    assert policy.level(long) == 0
    serving.step()
    assert policy.level(long) == 1


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=4, max_size=14),
    idle=st.integers(1, 12),
    period=st.integers(1, 6),
    quantum=st.integers(1, 8),
)
def test_who_waits_is_on_the_first_level_after_idle_and_period(
    lengths: list[int], idle: int, period: int, quantum: int
) -> None:
    policy = MultiLevelFeedback(quantum, idle, period)
    serving = Serving(policy, ALONE)
    requests = [serving.add(str(n), length, prompt=1 + n % 5) for n, length in enumerate(lengths)]
    waited = dict.fromkeys(requests, 0)

    def check() -> None:
        for request in requests:
            is_waiting = request.status is RequestStatus.WAITING
            waited[request] = waited[request] + 1 if is_waiting else 0
            if waited[request] > idle + period:
                assert policy.level(request) == 0
                assert _is_next_on_its_level(request, policy, requests)

    serving.finish(check)


def _is_next_on_its_level(request: Request, policy: MultiLevelFeedback, requests: list[Request]) -> bool:
    """Whether only earlier arrivals may be admitted before it."""
    waiting = [each for each in requests if each.status is RequestStatus.WAITING]
    return all(policy.rank(each) >= policy.rank(request) for each in waiting)


@pytest.mark.parametrize(
    ("inner", "order"),
    [("fcfs", "LabcABC"), ("sjf", "LcbaCBA"), ("sjf/fcfs", "LcbaABC"), ("fcfs/sjf", "LabcCBA")],
)
def test_each_level_has_its_policy(inner: str, order: str) -> None:
    """Small letters have prompts of the first level, large ones of the second; L holds the row first."""
    serving = Serving(f"mlfq:quantum=16,inner={inner}", ALONE)
    serving.add("L", 1)
    serving.step()
    for number, name in enumerate("ABCabc"):
        serving.add(name, 5 - number % 3, prompt=20 if name.isupper() else 1)
    assert serving.finish().admissions == list(order)


def test_within_a_level_nobody_is_displaced() -> None:
    serving = Serving("mlfq:quantum=64,inner=srtf", ALONE)
    serving.add("long", 20)
    serving.step()
    serving.add("short", 1)
    assert serving.finish().num_displaced == 0


def test_inner_policies_read_what_they_need() -> None:
    assert make_policy("mlfq:inner=fcfs/priority").honours_priority
    assert make_policy("mlfq:inner=ltr").needs_scores
    assert not make_policy("mlfq:inner=sjf").honours_priority


def test_an_inner_policy_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected inner .* one of fcfs, priority, sjf, .*got 'sjf/lpm'"):
        make_policy("mlfq:inner=sjf/lpm")


@pytest.mark.parametrize("option", ["quantum=0", "idle=0", "period=-1"])
def test_options_below_one_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"expected {option.split('=')[0]} of .* to be 1 or more, got"):
        make_policy(f"mlfq:{option}")
