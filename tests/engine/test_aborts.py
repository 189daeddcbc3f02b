"""Requests that are aborted leave the others as they are, and nothing behind."""

import random
from typing import Any

import pytest

from hpu_duo import HeadPattern
from hpu_duo.engine.outputs import RequestOutput
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, assert_holds_nothing, serve, tokens_of
from tests.modeling.families import prompts_of
from tests.tiers import crossed


@pytest.mark.parametrize(("seed", "pattern"), crossed(range(6), {"full": None, "duo": PATTERN}, fast="013"))
def test_aborts_at_random_times_leave_the_others_unchanged(
    tiny: Tiny, pattern: HeadPattern | None, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = prompts_of([rng.randint(1, 40) for _ in range(8)], seed)
    params = [
        SamplingParams(n=rng.randint(1, 2), temperature=1.2, seed=number, max_tokens=rng.randint(2, 20))
        for number in range(8)
    ]
    expected = tokens_of(serve(tiny.load(pattern=pattern), prompts, params))

    served = tiny.load(pattern=pattern, num_blocks=16, max_model_len=64)
    engine = served.engine
    names = [engine.add_request(prompt, one) for prompt, one in zip(prompts, params)]
    doomed = rng.sample(names, 4)
    tokens: dict[tuple[str, int], list[int]] = {}
    reasons: dict[tuple[str, int], list[FinishReason]] = {}
    while engine.has_unfinished:
        if doomed and rng.random() < 0.3:
            engine.abort(doomed.pop())
        for output in engine.step():
            key = (output.request_id, output.sample_index)
            tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                reasons.setdefault(key, []).append(output.finish_reason)
    assert_holds_nothing(served)
    for name, samples, one in zip(names, expected, params):
        for index in range(one.n):
            got, (reason,) = tokens[name, index], reasons[name, index]
            if reason is FinishReason.ABORT:
                assert got == samples[index][: len(got)]
            else:
                assert got == samples[index]


def test_abort_reports_once_and_knows_only_unfinished_requests(tiny: Tiny) -> None:
    engine = tiny.load().engine
    name = engine.add_request(prompts_of([9])[0], SamplingParams(temperature=0, max_tokens=5, n=2))
    engine.step()
    assert engine.abort(name)
    assert not engine.abort(name)
    assert not engine.abort("nobody")
    outputs = engine.step()
    assert [(o.request_id, o.sample_index, o.finish_reason) for o in outputs] == [
        (name, 0, FinishReason.ABORT),
        (name, 1, FinishReason.ABORT),
    ]
    assert not engine.has_unfinished


def test_an_abort_while_a_step_runs_leaves_the_others_unchanged(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=1.2, seed=2, max_tokens=8, ignore_eos=True)
    prompts = prompts_of([5, 7, 9])
    expected = tokens_of(serve(tiny.load(), prompts, params))
    served = tiny.load()
    engine, launch = served.engine, served.engine.runner.launch
    names = [engine.add_request(prompt, params) for prompt in prompts]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    num_steps = 0

    def aborting(*args: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            assert engine.abort(names[0])
        return launch(*args)

    monkeypatch.setattr(engine.runner, "launch", aborting)
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    assert [[tokens[name]] for name in names[1:]] == expected[1:]
    assert tokens[names[0]] == expected[0][0][: len(tokens[names[0]])]
    assert len(tokens[names[0]]) < 8
    assert_holds_nothing(served)


def test_generate_reports_only_its_own_requests_and_leaves_the_others_their_outputs(tiny: Tiny) -> None:
    served = tiny.load()
    engine = served.engine
    background = engine.add_request(prompts_of([4])[0], SamplingParams(temperature=0, max_tokens=4))
    seen: list[RequestOutput] = []
    engine.generate(prompts_of([5]), SamplingParams(temperature=0, max_tokens=8), on_output=seen.append)
    assert {output.request_id for output in seen} == {"request-1"}
    assert len(seen) == 8
    kept: list[RequestOutput] = []
    while engine.has_unfinished:
        kept += engine.step()
    assert [output.request_id for output in kept] == [background] * 4
    assert kept[-1].is_finished
    assert_holds_nothing(served)


def test_an_interrupted_generate_leaves_nothing_behind(tiny: Tiny) -> None:
    served = tiny.load()

    class Interrupted(KeyboardInterrupt):
        pass

    def interrupt(_: object) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        served.engine.generate(prompts_of([9, 30]), SamplingParams(max_tokens=5), on_output=interrupt)
    assert_holds_nothing(served)
    assert not served.engine.has_unfinished
