"""An error of one request ends it; who makes a step fail is found; the others are served."""

from __future__ import annotations

import gc
import logging
import os
import resource
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from graphs import BatchShape, BucketTable, GraphMissError, StepCost
from graphs.bucket_file import ShapeRecorder, read_shapes
from hpu_duo import HPUDuoModel
from hpu_duo.engine.outputs import RequestOutput
from hpu_duo.engine.samples import SampleState
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.engine.stepper import StepHandle
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import Tiny, assert_holds_nothing, serve, tokens_of
from tests.modeling.families import prompts_of
from tests.tiers import crossed

NAMES = ("a", "b", "c", "d")
PROMPTS = dict(zip(NAMES, prompts_of([6, 9, 20, 1])))
PARAMS = SamplingParams(temperature=1.2, seed=4, max_tokens=7, ignore_eos=True, repetition_penalty=1.2)


class Failure(Exception):
    """Raised in place of whatever may go wrong."""


class Served:
    """Outputs of a loop over ``step``, which goes on after errors."""

    def __init__(self, served: HPUDuoModel, params: SamplingParams = PARAMS) -> None:
        self.engine = served.engine
        self.tokens: dict[str, list[list[int]]] = {name: [[] for _ in range(params.n)] for name in NAMES}
        self.last: dict[str, RequestOutput] = {}
        self.raised: list[Exception] = []
        for name in NAMES:
            self.engine.add_request(PROMPTS[name], params, request_id=name)

    def loop(self) -> None:
        """Step until everything has ended."""
        while self.engine.has_unfinished:
            try:
                outputs = self.engine.step()
            except Exception as error:
                self.raised.append(error)
                assert len(self.raised) < 100, "the loop makes no progress"
                continue
            for output in outputs:
                self.tokens[output.request_id][output.sample_index] += output.token_ids
                self.last[output.request_id] = output

    def assert_only_one_failed(self, name: str, expected: Sequence[Any], error: type[Exception]) -> None:
        """All others have all of their tokens, and this one has its error."""
        for each, tokens in zip(NAMES, expected):
            if each != name:
                assert self.tokens[each] == tokens, each
                assert self.last[each].finish_reason is FinishReason.LENGTH
                assert self.last[each].error is None
        assert self.last[name].finish_reason is FinishReason.ERROR
        assert isinstance(self.last[name].error, error)


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[list[list[int]]]:
    return tokens_of(serve(tiny.load(), list(PROMPTS.values()), PARAMS))


def fails_for(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def failing(self: SampleState, *args: object) -> Any:
        if self.public_id == name and self.request.num_output_tokens >= 3:
            raise Failure
        return method(self, *args)

    return failing


@pytest.mark.parametrize("method", ["take", "sampling_row"], ids=["text", "row"])
def test_an_error_that_belongs_to_a_request_ends_that_request_only(
    tiny: Tiny, expected: Sequence[Any], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.load()
    monkeypatch.setattr(SampleState, method, fails_for(getattr(SampleState, method), "b"))
    served = Served(model)
    served.loop()
    assert served.raised == []
    served.assert_only_one_failed("b", expected, Failure)
    assert served.tokens["b"][0] == expected[1][0][: len(served.tokens["b"][0])]
    assert_holds_nothing(model)
    monkeypatch.undo()
    assert tokens_of(model.engine.generate([PROMPTS["b"]], PARAMS)) == [expected[1]]


def test_a_row_that_cannot_be_sampled_costs_the_others_no_step(tiny: Tiny, expected: Sequence[Any]) -> None:
    whole = tiny.load()
    Served(whole).loop()
    model = tiny.load()
    served = Served(model)
    [state] = model.engine._samples.of("b")
    state.penalties = None  # a history that a request with penalties must have
    served.loop()
    assert served.raised == []
    served.assert_only_one_failed("b", expected, ValueError)
    assert model.stats().num_prompt_tokens == whole.stats().num_prompt_tokens
    assert_holds_nothing(model)


class Picky:
    """Chooses greedily on the host, and fails at the fourth token, by choosing it or by ending behind it."""

    def __init__(self, model: HPUDuoModel, fails_at: str) -> None:
        self.model, self.fails_at, self.chooses = model, fails_at, True

    def choose(self, output_ids: Any, logits: Any, uniform: float) -> int:
        if len(output_ids) == 3 and self.fails_at == "choose":
            raise Failure
        if self.fails_at == "step":
            self.model.engine.step()
        return int(logits.argmax())

    def ends(self, output_ids: Any) -> bool:
        if len(output_ids) == 4 and self.fails_at == "ends":
            raise Failure
        return False


@pytest.mark.parametrize("fails_at", ["choose", "ends", "step"])
def test_code_of_the_caller_that_fails_ends_its_request_only(
    tiny: Tiny, expected: Sequence[Any], fails_at: str
) -> None:
    model = tiny.load()
    served = Served(model)
    params = SamplingParams(max_tokens=7, host_sampler=lambda _: Picky(model, fails_at))
    name = model.engine.add_request(PROMPTS["b"], params, request_id="picky")
    served.tokens[name] = [[]]
    served.loop()
    assert served.raised == []
    assert [served.tokens[each] for each in NAMES] == expected
    assert isinstance(served.last[name].error, RuntimeError if fails_at == "step" else Failure)
    assert len(served.tokens[name][0]) == (0 if fails_at == "step" else 3)
    assert_holds_nothing(model)


def poison(model: HPUDuoModel, name: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step with a row of this request fail in one of its phases once it has three tokens."""
    run = getattr(model.engine.runner, phase)

    def failing(step: StepPlan | StepHandle, *args: Any) -> Any:
        plan = step if isinstance(step, StepPlan) else step.plan
        for row in plan.rows:
            if row.request.request_id.startswith(f"{name}#") and row.request.num_output_tokens >= 3:
                raise Failure
        return run(step, *args)

    monkeypatch.setattr(model.engine.runner, phase, failing)


@pytest.mark.parametrize(
    ("num_blocks", "num_samples", "phase"), crossed([16, None], [1, 2], ["launch", "finish"])
)
def test_who_makes_steps_fail_is_found(
    tiny: Tiny, num_samples: int, num_blocks: int | None, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=1.2, seed=4, max_tokens=7, ignore_eos=True, n=num_samples)
    tokens = tokens_of(serve(tiny.load(), list(PROMPTS.values()), params))
    model = tiny.load(num_blocks=num_blocks, max_model_len=48)
    poison(model, "c", phase, monkeypatch)
    served = Served(model, params)
    served.loop()
    served.assert_only_one_failed("c", tokens, Failure)
    assert {type(error) for error in served.raised} == {Failure}
    # Twice for each sample that fails, and not for those that are tried alone.
    assert 2 <= len(served.raised) <= 2 * num_samples
    assert_holds_nothing(model)


def test_one_failure_ends_nobody(
    tiny: Tiny, expected: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.load()
    launch, num_calls = model.engine.runner.launch, 0

    def fails_now_and_then(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (2, 9):
            raise Failure
        return launch(*args)

    monkeypatch.setattr(model.engine.runner, "launch", fails_now_and_then)
    served = Served(model)
    served.loop()
    assert len(served.raised) == 2
    assert [served.tokens[name] for name in NAMES] == expected
    assert_holds_nothing(model)


def test_where_every_step_fails_every_request_ends_with_the_error(
    tiny: Tiny, expected: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.load()

    def fail(*_: Any) -> None:
        raise Failure

    with monkeypatch.context() as patched:
        patched.setattr(model.engine.runner, "launch", fail)
        served = Served(model)
        served.loop()
    assert {name: type(served.last[name].error) for name in NAMES} == dict.fromkeys(NAMES, Failure)
    assert_holds_nothing(model)
    again = Served(model)
    again.loop()
    assert [again.tokens[name] for name in NAMES] == expected


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_request_of_a_failed_step_is_let_go_when_it_ends(
    tiny: Tiny, num_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.load()
    monkeypatch.setattr(model.engine.runner, "launch", _fail)
    served = Served(model)
    kept = [weakref.ref(model.engine.scheduler.get(f"{name}#0")) for name in NAMES]
    assert all(each() is not None for each in kept)
    for _ in range(num_failures):
        with pytest.raises(Failure):
            model.engine.step()
    for name in NAMES:
        assert served.engine.abort(name)
    gc.collect()
    assert [each() for each in kept] == [None] * len(NAMES)


def _fail(*_: Any) -> None:
    raise Failure


def test_a_request_whose_shape_no_bucket_holds_ends_and_the_others_go_on(
    tiny: Tiny, expected: Sequence[Any]
) -> None:
    # Prompts of up to nine tokens fit; twenty are computed in a chunk that does not.
    shapes = ("csu/q12/s8/u48/l4", "--u/q4/s0/u48/l4")
    table = BucketTable(tuple(map(BatchShape.parse, shapes)), StepCost())
    model = tiny.load(buckets=table, on_miss="error")
    served = Served(model)
    served.loop()
    served.assert_only_one_failed("c", expected, GraphMissError)
    assert {type(error) for error in served.raised} <= {GraphMissError}
    assert_holds_nothing(model)


def test_requests_that_miss_the_table_together_are_served_one_by_one(
    tiny: Tiny, expected: Sequence[Any]
) -> None:
    table = BucketTable((BatchShape.parse("csu/q16/s8/u48/l1"),), StepCost())
    model = tiny.load(buckets=table, on_miss="error")
    served = Served(model)
    served.loop()
    assert [served.tokens[name] for name in NAMES] == expected
    assert {type(error) for error in served.raised} == {GraphMissError}
    assert_holds_nothing(model)


def test_generate_raises_the_error_of_its_own_request(
    tiny: Tiny, expected: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.load()
    monkeypatch.setattr(SampleState, "take", fails_for(SampleState.take, "request-1"))
    seen: list[RequestOutput] = []
    with pytest.raises(Failure):
        model.engine.generate([PROMPTS["a"], PROMPTS["b"]], PARAMS, seen.append)
    assert [output.request_id for output in seen if output.error is not None] == ["request-1"]
    assert not model.engine.has_unfinished
    assert_holds_nothing(model)


def test_generate_is_not_ended_by_the_request_of_somebody_else(
    tiny: Tiny, expected: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.load()
    poison(model, "b", "launch", monkeypatch)
    model.engine.add_request(PROMPTS["b"], PARAMS, request_id="b")
    assert tokens_of(model.engine.generate([PROMPTS["c"]], PARAMS)) == [expected[2]]
    *_, last = model.engine.step()
    assert isinstance(last.error, Failure)
    assert_holds_nothing(model)


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Files cannot grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_nobody_a_token(
    tiny: Tiny, expected: Sequence[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "shapes.jsonl"
    model = tiny.load(record_shapes=path)
    served = Served(model)
    with full_disk(100), caplog.at_level(logging.WARNING):
        served.loop()
    assert served.raised == []
    assert [served.tokens[name] for name in NAMES] == expected
    stats = model.stats()
    assert 0 < sum(read_shapes(path).values()) == stats.num_steps - stats.num_unrecorded_steps
    assert stats.num_prompt_tokens == sum(map(len, PROMPTS.values()))
    assert [record.name for record in caplog.records] == ["hpu_duo.engine.telemetry"]


def test_a_line_that_does_not_fit_on_the_disk_leaves_the_recording_whole(tmp_path: Path) -> None:
    shape = BatchShape.parse("csu/q16/s8/u48/l1")
    with ShapeRecorder(tmp_path / "shapes.jsonl") as recorder:
        recorder.add(shape)
        size = os.path.getsize(recorder.path)
        with full_disk(size + 10), pytest.raises(OSError):
            recorder.add(shape)
        assert os.path.getsize(recorder.path) == size
        recorder.add(shape)
    assert read_shapes(recorder.path) == {shape: 2}
