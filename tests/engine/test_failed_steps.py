"""A step that fails, on a missing bucket or an interrupt, costs nobody a token."""

from typing import Any

import pytest

from graphs import BatchShape, BucketTable, GraphMissError, StepCost
from hpu_duo import HeadPattern
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, assert_holds_nothing, serve, tokens_of
from tests.modeling.families import prompts_of
from tests.tiers import crossed

PARAMS = SamplingParams(temperature=1.3, seed=4, max_tokens=12)


def test_a_shape_outside_the_table_fails_its_call_and_the_next_one_is_served(tiny: Tiny) -> None:
    table = BucketTable((BatchShape.parse("csu/q16/s8/u48/l1"),), StepCost())
    served = tiny.load(buckets=table, on_miss="error")
    with pytest.raises(GraphMissError):
        served.generate(prompts_of([5, 5]), max_new_tokens=3)
    assert_holds_nothing(served)
    expected = tiny.load().generate(prompts_of([5]), max_new_tokens=3)
    assert served.generate(prompts_of([5]), max_new_tokens=3).tolist() == expected.tolist()


class Interrupt(KeyboardInterrupt):
    """An interrupt, told apart from a real Ctrl-C."""


@pytest.mark.parametrize(("pattern", "phase"), crossed({"full": None, "duo": PATTERN}, ["launch", "finish"]))
def test_interrupted_steps_are_computed_anew(
    tiny: Tiny, pattern: HeadPattern | None, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of([30, 9, 1, 22])
    expected = tokens_of(serve(tiny.load(pattern=pattern), prompts, PARAMS))
    served = tiny.load(pattern=pattern)
    engine, run = served.engine, getattr(served.engine.runner, phase)
    num_calls = 0

    def interrupted_after_the_fact(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        result = run(*args)
        # A failed step loses what rings hold, so requests are read again.
        if num_calls % 4 == 0:
            raise Interrupt
        return result

    monkeypatch.setattr(engine.runner, phase, interrupted_after_the_fact)
    tokens: dict[str, list[int]] = {engine.add_request(prompt, PARAMS): [] for prompt in prompts}
    while engine.has_unfinished:
        try:
            outputs = engine.step()
        except Interrupt:
            continue
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    assert [[one] for one in tokens.values()] == expected
    assert num_calls > 8
    assert_holds_nothing(served)


def test_an_abort_is_still_reported_when_the_step_that_would_report_it_fails(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tiny.load()
    engine = served.engine
    doomed, other = (engine.add_request(prompt, PARAMS) for prompt in prompts_of([6, 7]))
    engine.step()
    engine.abort(doomed)
    with monkeypatch.context() as patched:

        def fail(*_: Any) -> None:
            raise Interrupt

        patched.setattr(engine.runner, "launch", fail)
        with pytest.raises(Interrupt):
            engine.step()
    reported = [output.request_id for output in engine.step() if output.is_finished]
    assert reported == [doomed]
    engine.abort(other)
    engine.step()
    assert_holds_nothing(served)
