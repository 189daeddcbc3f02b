"""An admission that fails in the middle leaves nothing behind."""

from __future__ import annotations

import pytest

from hpu_duo.engine.outputs import RequestOutput
from hpu_duo.engine.samples import SampleState
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import Tiny, assert_holds_nothing

PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


class Failure(Exception):
    """Raised in place of whatever may go wrong."""


def test_an_admission_that_fails_leaves_nothing_behind(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    served = tiny.load()
    engine = served.engine
    monkeypatch.setattr(SampleState, "__init__", lambda *_, **__: (_ for _ in ()).throw(Failure()))
    with pytest.raises(Failure):
        engine.add_request([1, 2], PARAMS, request_id="a")
    monkeypatch.undo()
    assert not engine.has_unfinished
    engine.add_request([1, 2], PARAMS, request_id="a")
    outputs: list[RequestOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert sum(len(output.token_ids) for output in outputs) == 3
    assert_holds_nothing(served)
