"""Shortest first, by known and by learned lengths, with and without displacement."""

from __future__ import annotations

from itertools import accumulate, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.request import Request
from hpu_duo.scheduling import SchedulingPolicy, ShortestJobFirst, make_policy
from hpu_duo.scheduling.ranked import RecentLengths
from tests.engine_host.simulated_device import make_request
from tests.scheduling.ranked_machine import Place, RankedMachine
from tests.scheduling.serving import ALONE, Serving


class ShortestMachine(RankedMachine):
    def make_policy(self) -> SchedulingPolicy:
        return ShortestJobFirst(patience=float("inf"))

    def place(self, request: Request) -> Place:
        room = len(request.tokens) - request.num_prompt_tokens
        expected = request.params.expected_tokens
        return (room if expected is None or expected > room else expected,)


TestShortestMachine = ShortestMachine.TestCase
TestShortestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def serve(policy: str, lengths: list[int]) -> Serving:
    serving = Serving(policy, ALONE)
    for number, length in enumerate(lengths):
        serving.add(str(number), length)
    return serving.finish()


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7))
def test_no_order_of_requests_that_come_together_has_an_earlier_mean_end(lengths: list[int]) -> None:
    best = min(sum(accumulate(order)) for order in permutations(lengths)) / len(lengths)
    assert serve("sjf:patience=inf", lengths).mean_end == best
    assert serve("srtf:patience=inf", lengths).mean_end == best
    assert serve("fcfs", lengths).mean_end == sum(accumulate(lengths)) / len(lengths)


def test_the_example_of_the_paper_on_learning_to_rank() -> None:
    """Outputs of 10, 2 and 1 tokens: steps per token 6.67 as they come, 1.27 by their lengths."""
    lengths = [10, 2, 1]
    per_token = {
        policy: sum(serve(policy, lengths).ends[str(n)] / length for n, length in enumerate(lengths)) / 3
        for policy in ("fcfs", "sjf")
    }
    assert per_token["fcfs"] == pytest.approx(6.67, abs=0.005)
    assert per_token["sjf"] == pytest.approx(1.27, abs=0.005)


@settings(max_examples=40, deadline=None)
@given(
    coming=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=8).map(sorted),
)
def test_srtf_is_at_every_step_at_whoever_has_least_to_come(coming: list[tuple[int, int]]) -> None:
    """One row; a request computes its prompt anew when it comes back, which takes no step of its own."""
    serving, left = Serving("srtf:patience=inf", ALONE), dict[str, int]()
    waiting = list(enumerate(coming))
    while waiting or left:
        while waiting and (waiting[0][1][0] <= serving.num_steps or not left):
            number, (_, length) = waiting.pop(0)
            serving.add(str(number), length)
            left[str(number)] = length
        [served] = serving.step()
        assert left[served] == min(left.values())
        left[served] -= 1
        if not left[served]:
            del left[served]
            assert served in serving.ends


def test_a_shorter_request_displaces_a_longer_one_which_keeps_its_tokens() -> None:
    serving = Serving("srtf", ALONE)
    long = serving.add("long", 20)
    serving.step()
    serving.step()
    serving.add("short", 2)
    assert [serving.step(), serving.step(), serving.step()] == [["short"], ["short"], ["long"]]
    assert (serving.num_displaced, long.num_output_tokens) == (1, 3)


def test_a_long_request_is_overtaken_as_often_as_patience_has_it_and_not_displaced_then() -> None:
    serving = Serving("srtf:patience=4", ALONE)
    serving.add("long", 30)
    for number in range(80):
        serving.add(f"short{number}", 1)
        serving.step()
    assert serving.admissions.index("long") == 4
    assert serving.ends["long"] == 4 + 30


def test_recent_lengths_are_those_of_the_user_then_those_of_all() -> None:
    lengths = RecentLengths(num_outputs=2)
    assert lengths.of(make_request("first", max_tokens=9)) == 9
    for name, user, num_tokens in (("a", "ann", 4), ("b", "ann", 6), ("c", "ann", 8), ("d", "bob", 1)):
        request = make_request(name, max_tokens=num_tokens, user=user, ignore_eos=True)
        for _ in range(num_tokens):
            request.append(5)
        lengths.ended(request)
    assert lengths.of(make_request("of ann", user="ann", max_tokens=50)) == 7
    assert lengths.of(make_request("of bob", user="bob", max_tokens=50)) == 1
    assert lengths.of(make_request("of nobody", max_tokens=50)) == (4 + 6 + 8 + 1) / 4


def test_lengths_that_are_unknown_are_refused() -> None:
    with pytest.raises(ValueError, match="expected lengths to be one of stated, recent, got 'guessed'"):
        make_policy("sjf:lengths=guessed")
