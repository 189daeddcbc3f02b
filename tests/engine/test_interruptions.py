"""Failures in the middle of a step or of an admission: nothing wedges, nobody else is touched."""

from __future__ import annotations

import pytest

from hpu_duo.engine.output_text import SampleState
from hpu_duo.engine.outputs import RequestOutput
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import Tiny, assert_holds_nothing

PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
PROMPTS = {"a": [1, 2, 3, 4], "b": [5, 6, 7], "c": [8, 9]}


class Failure(Exception):
    """Raised in place of whatever may go wrong."""


def drain(engine: object) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished:  # type: ignore[attr-defined]
        for output in engine.step():  # type: ignore[attr-defined]
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_a_token_that_cannot_be_turned_into_text_ends_its_request_only(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tiny.load()
    engine = served.engine
    expected = {
        name: done[0].token_ids for name, done in zip(PROMPTS, engine.generate(PROMPTS.values(), PARAMS))
    }
    take = SampleState.take

    def failing(self: SampleState, *args: object) -> RequestOutput:
        if self.public_id == "b":
            raise Failure
        return take(self, *args)  # type: ignore[arg-type]

    for name, prompt in PROMPTS.items():
        engine.add_request(prompt, PARAMS, request_id=name)
    monkeypatch.setattr(SampleState, "take", failing)
    with pytest.raises(Failure):
        drain(engine)
    outputs = drain(engine)
    assert [output.finish_reason for output in outputs["b"]] == [FinishReason.ABORT]
    assert tokens(outputs["a"]) == expected["a"]
    assert tokens(outputs["c"]) == expected["c"]
    assert_holds_nothing(served)
    monkeypatch.undo()
    engine.add_request(PROMPTS["b"], PARAMS, request_id="b")
    assert tokens(drain(engine)["b"]) == expected["b"]


def test_a_failure_before_the_forward_is_taken_back(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    served = tiny.load()
    engine = served.engine
    expected = engine.generate([PROMPTS["a"]], PARAMS)[0][0].token_ids

    def failing(self: SampleState) -> None:
        raise Failure

    engine.add_request(PROMPTS["a"], PARAMS, request_id="a")
    monkeypatch.setattr(SampleState, "sampling_row", failing)
    with pytest.raises(Failure):
        engine.step()
    monkeypatch.undo()
    assert tokens(drain(engine)["a"]) == expected
    assert_holds_nothing(served)


def test_an_admission_that_fails_leaves_nothing_behind(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    served = tiny.load()
    engine = served.engine
    monkeypatch.setattr(SampleState, "__init__", lambda *_, **__: (_ for _ in ()).throw(Failure()))
    with pytest.raises(Failure):
        engine.add_request([1, 2], PARAMS, request_id="a")
    monkeypatch.undo()
    assert not engine.has_unfinished
    engine.add_request(PROMPTS["a"], PARAMS, request_id="a")
    assert len(tokens(drain(engine)["a"])) == 3
    assert_holds_nothing(served)
