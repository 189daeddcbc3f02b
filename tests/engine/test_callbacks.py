"""A callback of `generate` may call the engine, and its call loses nothing."""

from collections.abc import Callable

import pytest
import torch

from hpu_duo import HPUDuoModel
from hpu_duo.engine.engine import Engine
from hpu_duo.engine.outputs import RequestOutput
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import Tiny, assert_holds_nothing, serve, tokens_of
from tests.modeling.families import prompts_of
from tests.tiers import crossed

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OUTER, INNER = prompts_of([9, 5])


def drain(engine: Engine, _: RequestOutput | None = None) -> None:
    while engine.has_unfinished:
        engine.step()


def generate(engine: Engine, _: RequestOutput | None = None) -> None:
    engine.generate([INNER], PARAMS)


def score(engine: Engine, _: RequestOutput | None = None) -> None:
    engine.score([INNER], [[[4, 5], [6]]])


def add_and_abort(engine: Engine, _: RequestOutput) -> None:
    engine.abort(engine.add_request(INNER, PARAMS))


def step(engine: Engine, _: RequestOutput) -> None:
    engine.step()


@pytest.mark.parametrize(
    ("callback", "num_samples"),
    crossed({each.__name__: each for each in (drain, generate, score, add_and_abort, step)}, [1, 2]),
)
def test_a_call_gets_all_of_its_tokens_whatever_its_callback_calls(
    tiny: Tiny, callback: Callable[[Engine, RequestOutput], None], num_samples: int
) -> None:
    params = SamplingParams(temperature=1.2, seed=3, max_tokens=8, ignore_eos=True, n=num_samples)
    [expected] = tokens_of(serve(tiny.load(), [OUTER], params))
    served = tiny.load()
    engine = served.engine
    seen: list[int] = []

    def on_output(output: RequestOutput) -> None:
        seen.extend(output.token_ids)
        callback(engine, output)

    [samples] = engine.generate([OUTER], params, on_output)
    assert [sample.token_ids for sample in samples] == expected
    assert [sample.finish_reason for sample in samples] == [FinishReason.LENGTH] * num_samples
    assert sorted(seen) == sorted(token for tokens in expected for token in tokens)
    drain(engine, RequestOutput("", 0, ()))
    assert_holds_nothing(served)


def test_a_request_that_its_own_callback_aborts_says_so(tiny: Tiny) -> None:
    served = tiny.load()
    engine = served.engine
    outputs: list[RequestOutput] = []

    def on_output(output: RequestOutput) -> None:
        outputs.append(output)
        if len(outputs) == 3:
            engine.abort(output.request_id)

    [[aborted]] = engine.generate([OUTER], PARAMS, on_output)
    assert len(aborted.token_ids) == 3
    assert aborted.finish_reason is FinishReason.ABORT
    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert not engine.has_unfinished
    assert_holds_nothing(served)


def test_callbacks_may_call_each_other_to_any_depth(tiny: Tiny) -> None:
    expected = tokens_of(serve(tiny.load(), [OUTER], PARAMS))
    served = tiny.load()
    engine = served.engine

    def deeper(depth: int) -> Callable[[RequestOutput], None]:
        def on_output(output: RequestOutput) -> None:
            if depth and output.is_finished:
                assert tokens_of(engine.generate([OUTER], PARAMS, deeper(depth - 1))) == expected

        return on_output

    assert tokens_of(engine.generate([OUTER], PARAMS, deeper(5))) == expected
    assert_holds_nothing(served)


class Asker:
    """A streamer that generates something else for each token that it gets."""

    def __init__(self, served: HPUDuoModel) -> None:
        self.served, self.tokens = served, list[int]()

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()
        self.served.generate([INNER], max_new_tokens=2)

    def end(self) -> None:
        self.served.generate([INNER], max_new_tokens=2)


def test_a_streamer_may_generate(tiny: Tiny) -> None:
    expected = tiny.load().generate([OUTER], max_new_tokens=8)
    served = tiny.load()
    asker = Asker(served)
    result = served.generate([OUTER], max_new_tokens=8, streamer=asker)
    assert result.tolist() == expected.tolist()
    assert asker.tokens == expected[0].tolist()
    assert_holds_nothing(served)


def test_a_name_stays_in_use_while_its_call_is_under_way(tiny: Tiny) -> None:
    served = tiny.load()
    engine = served.engine
    refusals: list[str] = []

    def on_output(output: RequestOutput) -> None:
        if output.is_finished:
            with pytest.raises(ValueError, match="in use") as refusal:
                engine.add_request(INNER, PARAMS, request_id=output.request_id)
            refusals.append(str(refusal.value))

    [[done], _] = engine.generate([OUTER, INNER], PARAMS, on_output)
    assert len(done.token_ids) == 8
    assert len(refusals) == 2
    assert_holds_nothing(served)


def test_a_callback_may_add_requests_without_a_name_whatever_names_are_in_use(tiny: Tiny) -> None:
    served = tiny.load()
    engine = served.engine
    # The next name by number is taken, so the names of the call are ahead of the numbers.
    engine.add_request(INNER, PARAMS, request_id="request-1")
    added: list[str] = []

    def on_output(output: RequestOutput) -> None:
        if output.is_finished and not added:
            added.append(engine.add_request(INNER, PARAMS))

    short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    engine.generate([OUTER, INNER], [PARAMS, short], on_output)
    drain(engine)
    assert len(added) == 1
    assert_holds_nothing(served)


@pytest.mark.parametrize("ask", [generate, score])
def test_a_call_within_a_step_is_refused_and_leaves_nothing_behind(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., None]
) -> None:
    served = tiny.load()
    engine, launch = served.engine, served.engine.runner.launch

    def run_and_ask(*args: object) -> object:
        with pytest.raises(RuntimeError, match="step"):
            ask(engine)
        return launch(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "launch", run_and_ask)
    [[done]] = engine.generate([OUTER], PARAMS)
    assert len(done.token_ids) == 8
    assert not engine.has_unfinished
    assert_holds_nothing(served)


def test_a_step_within_a_step_is_refused_and_costs_nobody_a_token(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(serve(tiny.load(), [OUTER], PARAMS))
    served = tiny.load()
    engine, launch = served.engine, served.engine.runner.launch
    num_refused = 0

    def run_and_step(*args: object) -> object:
        nonlocal num_refused
        with pytest.raises(RuntimeError, match="step"):
            engine.step()
        num_refused += 1
        return launch(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "launch", run_and_step)
    assert tokens_of(engine.generate([OUTER], PARAMS)) == expected
    assert num_refused == 8
    assert_holds_nothing(served)
