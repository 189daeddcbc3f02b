"""Scheduling, seen from outside: a long prompt never holds up a decode."""

import pytest

from hpu_duo.request import Request
from hpu_duo.sampling import SamplingParams
from hpu_duo.scheduling import POLICIES, FirstComeFirstServed, Waiting
from tests.engine.tiny import Tiny, assert_holds_nothing, tokens_of
from tests.modeling.families import prompts_of


@pytest.mark.parametrize("max_chunk_rows", [1, 3])
def test_every_running_decode_is_in_every_step_while_long_prompts_are_prefilled(
    tiny: Tiny, max_chunk_rows: int
) -> None:
    served = tiny.load(max_num_batched_tokens=6, max_chunk_rows=max_chunk_rows)
    engine = served.engine
    decode = engine.add_request(prompts_of([3])[0], SamplingParams(temperature=0, max_tokens=40))
    outputs = engine.step()
    assert [output.request_id for output in outputs] == [decode]
    for prompt in prompts_of([80, 70], seed=1):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=2))
    for _ in range(39):
        outputs = engine.step()
        assert decode in {output.request_id for output in outputs}
    assert served.stats().num_prompt_tokens == 3 + 80 + 70
    while engine.has_unfinished:
        engine.step()
    assert_holds_nothing(served)


def test_a_step_holds_no_more_tokens_than_its_budget(tiny: Tiny) -> None:
    served = tiny.load(max_num_batched_tokens=6)
    engine = served.engine
    for prompt in prompts_of([30, 2, 17, 9, 5]):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=6))
    before = 0
    while engine.has_unfinished:
        engine.step()
        after = served.stats().num_query_tokens
        assert after - before <= 6
        before = after
    assert_holds_nothing(served)


class LatestFirst(FirstComeFirstServed):
    """Admits the latest arrival."""

    def next(self, waiting: Waiting) -> Request:
        return waiting.arrivals.last


def test_a_policy_that_is_listed_serves_the_same_tokens_in_another_order(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "latest", LatestFirst)
    prompts, params = prompts_of([9, 20, 4]), SamplingParams(temperature=0, max_tokens=5)
    done, order = {}, {name: list[str]() for name in ("fcfs", "latest")}
    for name, ended in order.items():
        served = tiny.load(max_num_seqs=1, scheduling_policy=name)
        completions = served.engine.generate(
            prompts, params, lambda one, ended=ended: ended.append(one.request_id)
        )
        done[name] = tokens_of(completions)
        assert_holds_nothing(served)
    assert done["latest"] == done["fcfs"]
    assert list(dict.fromkeys(order["latest"])) == list(dict.fromkeys(order["fcfs"]))[::-1]


def test_an_unknown_policy_is_refused_before_weights_are_read(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=r"expected scheduling_policy to be one of fcfs, .*got 'lottery'"):
        tiny.load(scheduling_policy="lottery")


def test_a_policy_by_name_serves_the_most_urgent_first_and_is_told_in_stats(tiny: Tiny) -> None:
    served = tiny.load(max_num_seqs=1, scheduling_policy="priority:patience=50")
    prompts = prompts_of([4, 4, 4])
    each = [SamplingParams(temperature=0, max_tokens=2, priority=value) for value in (3, -1, 0)]
    ended: list[str] = []
    served.engine.generate(prompts, each, lambda one: ended.append(one.request_id))
    assert list(dict.fromkeys(ended)) == ["request-1", "request-2", "request-0"]
    assert served.stats().resolved.scheduling_policy == "priority:patience=50"


def test_a_prompt_with_a_priority_is_refused_first_come_first_served(tiny: Tiny) -> None:
    engine = tiny.load().engine
    with pytest.raises(ValueError, match="priority: expected 0, got 2"):
        engine.add_request(prompts_of([4])[0], SamplingParams(priority=2))
    assert not engine.has_unfinished
