"""The engine's thread and the event loop: what goes to and fro, and what happens when one of them is late."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hpu_duo import HPUDuoModel
from hpu_duo.engine.outputs import RequestOutput
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams
from hpu_duo.server.running import (
    AnswerMemory,
    AnswerMemoryFullError,
    AnswerTooLargeError,
    AsyncEngine,
    ChoiceOutput,
    EngineDiedError,
    OutputStream,
    RequestFailedError,
    SlowReaderError,
    Submission,
    async_engine,
)
from hpu_duo.server.running.admission import Admission, NotServingError, QueueFullError, Stage, Timing
from tests.engine.tiny import assert_holds_nothing, tokens_of
from tests.modeling.families import prompts_of
from tests.server.conftest import TinyChat

PARAMS = SamplingParams(temperature=1.2, seed=3, max_tokens=12, n=2)


@asynccontextmanager
async def started(model: HPUDuoModel, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(model.engine, **options)
    engine.start()
    try:
        yield engine
    finally:
        assert await engine.stop()
        assert_holds_nothing(model)
        assert engine.num_open == 0


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


async def tokens(stream: OutputStream, num_choices: int) -> list[list[int]]:
    """Read to the end; the tokens of each choice."""
    found: list[list[int]] = [[] for _ in range(num_choices)]
    while (batch := await stream.read()) is not None:
        for choice, output in batch:
            found[choice] += output.token_ids
    return found


def test_one_stream_gets_the_outputs_of_several_requests_in_order_of_choices(tiny: TinyChat) -> None:
    model, prompts = tiny.load(), prompts_of([5, 9, 20])
    expected = [sample for done in tokens_of(tiny.load().engine.generate(prompts, PARAMS)) for sample in done]

    async def work() -> None:
        async with started(model) as engine:
            asked = [Submission(f"r{n}", prompt, PARAMS, 2 * n) for n, prompt in enumerate(prompts)]
            stream = engine.open(asked)
            assert engine.num_open == 6
            assert await tokens(stream, 6) == expected
            assert stream.timing.first is not None
            assert await stream.read() is None

    run(work)


def test_a_late_reader_gets_more_at_a_time_and_a_very_late_one_an_error(tiny: TinyChat) -> None:
    model = tiny.load()
    params = SamplingParams(temperature=0.0, max_tokens=30)
    [prompt] = prompts_of([5])

    async def work() -> None:
        async with started(model, max_behind=40) as engine:
            stream = engine.open([Submission("late", prompt, params)])
            while stream.num_open:
                await asyncio.sleep(0.01)
            batch = await stream.read()
            assert batch is not None
            assert len(batch) == 30
            assert await stream.read() is None
        async with started(model, max_behind=10) as engine:
            told = []
            stream = engine.open([Submission("later", prompt, params)])
            stream.on_slow = lambda: told.append(True)
            while stream.error is None:
                await asyncio.sleep(0.01)
            with pytest.raises(SlowReaderError):
                await stream.read()
            assert told

    run(work)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_answer_bytes": 40_000}, "answer of at most 40,000 bytes in memory"),
        ({"answer_memory_bytes": 40_000}, "aborted: .* all calls together of at most 40,000 bytes"),
    ],
)
def test_a_stream_that_is_read_and_echoes_too_much_is_not_called_slow(
    tiny: TinyChat, limits: dict[str, int], expected: str
) -> None:
    model = tiny.load()

    async def work() -> None:
        async with started(model, **limits) as engine:
            holding, told = engine.hold(), []
            holding.echo(9_990, 1)
            stream = engine.open([Submission("x", prompts_of([5])[0], PARAMS)], holding=holding)
            stream.on_slow = lambda: told.append(True)
            with pytest.raises((AnswerTooLargeError, AnswerMemoryFullError), match=expected):
                await tokens(stream, 2)
            assert not told

    run(work)


def test_a_closed_stream_aborts_its_requests_and_ends_the_read_under_way(tiny: TinyChat) -> None:
    model = tiny.load()
    params = SamplingParams(temperature=0.0, max_tokens=80)

    async def work() -> None:
        async with started(model) as engine:
            stream = engine.open([Submission("x", prompts_of([5])[0], params)])
            reading = asyncio.create_task(tokens(stream, 1))
            while stream.timing.first is None:
                await asyncio.sleep(0.001)
            stream.close()
            assert len((await reading)[0]) < 80
            assert engine.num_open == 0
            while await engine.ask(lambda one: one.scheduler.has_unfinished):
                pass

    run(work)


def test_what_the_engine_refuses_late_fails_the_stream_and_aborts_the_others(tiny: TinyChat) -> None:
    model = tiny.load()

    async def work() -> None:
        async with started(model) as engine:
            asked = [Submission("a", prompts_of([5])[0], PARAMS), Submission("b", [], PARAMS, 2)]
            with pytest.raises(RequestFailedError, match="at least one prompt token"):
                await tokens(engine.open(asked), 4)
            assert engine.num_open == 0
            with pytest.raises(ValueError, match="at least one prompt token"):
                await engine.check([], PARAMS)

    run(work)


def test_questions_are_answered_between_steps_and_their_errors_raised(tiny: TinyChat) -> None:
    model = tiny.load()

    async def work() -> None:
        async with started(model) as engine:
            assert (await engine.ask(lambda one: one.stats())).total_rows == 4
            with pytest.raises(ZeroDivisionError):
                await engine.ask(lambda one: 1 // 0)
            assert engine.stats.total_rows == 4

    run(work)


def test_a_dead_engine_fails_what_is_open_and_refuses_the_rest(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.load()
    submission = Submission("x", prompts_of([5])[0], PARAMS)

    def die() -> None:
        raise SystemExit("out")

    async def work() -> None:
        engine = AsyncEngine(model.engine)
        engine.start()
        monkeypatch.setattr(model.engine, "step", die)
        with pytest.raises(EngineDiedError, match="out"):
            await tokens(engine.open([submission]), 2)
        assert not engine.is_alive
        with pytest.raises(EngineDiedError):
            engine.open([submission])
        with pytest.raises(EngineDiedError):
            await engine.ask(lambda one: one.stats())
        await engine.stop()

    run(work)


def test_readers_are_woken_without_news(tiny: TinyChat, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.load()

    async def work() -> None:
        async with started(model, no_news_s=0.01) as engine:
            await engine.ask(lambda one: monkeypatch.setattr(one, "step", list))
            stream = engine.open([Submission("x", prompts_of([5])[0], PARAMS)])
            assert await stream.read() == []
            monkeypatch.undo()
            assert len((await tokens(stream, 2))[0]) == 12

    run(work)


def test_a_late_loop_hands_on_the_outputs_of_several_steps_at_once(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.load()

    async def work() -> None:
        async with started(model) as engine:
            await engine.ask(lambda one: monkeypatch.setattr(one, "step", list))
            stream, taken = engine.open([Submission("x", prompts_of([5])[0], PARAMS)]), []

            def take(batch: list[ChoiceOutput]) -> bool:
                taken.append([one.output.token_ids for one in batch])
                return True

            reading = asyncio.create_task(stream.read(take))
            await asyncio.sleep(0)
            for token in (7, 8):
                engine.stepped([RequestOutput("x", 0, (token,))], 0.0)
            await asyncio.sleep(0.01)
            assert taken == [[(7,), (8,)]]
            monkeypatch.undo()
            stream.close()
            assert await reading is None

    run(work)


def test_times_are_told_for_each_choice() -> None:
    class Watch:
        def __init__(self) -> None:
            self.firsts: list[float] = []
            self.nexts: list[float] = []

        def first_token(self, seconds: float) -> None:
            self.firsts.append(seconds)

        def next_token(self, seconds: float) -> None:
            self.nexts.append(seconds)

    watch = Watch()
    timing = Timing(watch)
    for choice, after in ((0, 1.0), (1, 1.5), (0, 3.0), (1, 3.0)):
        timing.came(choice, timing.arrived + after)
    assert watch.firsts == pytest.approx([1.0, 1.5])
    assert watch.nexts == pytest.approx([2.0, 1.5])


def test_the_queue_has_an_end_and_one_large_call_is_taken_when_it_is_empty() -> None:
    admission = Admission(4)
    with pytest.raises(NotServingError, match="warming up"):
        admission.admit(0, 1)
    admission.stage = Stage.READY
    admission.admit(0, 100)
    admission.admit(3, 1)
    with pytest.raises(QueueFullError, match="at most 4") as refused:
        admission.admit(3, 2)
    assert refused.value.retry_after_s == 1  # nothing is known


def test_a_full_queue_says_when_to_come_again_by_how_fast_the_last_samples_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("hpu_duo.server.running.admission.time.monotonic", lambda: now)
    admission = Admission(4)
    admission.stage = Stage.READY

    def wait(num_samples: int) -> int:
        with pytest.raises(QueueFullError) as refused:
            admission.admit(4, num_samples)
        return refused.value.retry_after_s

    for _ in range(4):  # one in ten seconds
        admission.ended(1)
        now += 10
    assert [wait(1), wait(2), wait(5), wait(7)] == [10, 20, 50, 60]
    now += 8
    assert wait(1) == 12
    for _ in range(64):  # two in a second; those before are forgotten
        admission.ended(1)
        now += 0.5
    assert [wait(1), wait(3), wait(40)] == [1, 2, 20]


def test_outputs_of_samples_end_their_request_with_the_last_of_them() -> None:
    aborted: list[str] = []
    stream = OutputStream(
        [Submission("x", [1], PARAMS, 4)], 10, AnswerMemory(10_000).hold(10_000), aborted.extend, Timing()
    )

    def output(sample: int, reason: FinishReason | None) -> RequestOutput:
        return RequestOutput("x", sample, (7,), finish_reason=reason)

    assert not stream.push(output(1, None), 0.0)
    assert not stream.push(output(1, FinishReason.STOP), 0.0)
    assert stream.push(output(0, FinishReason.LENGTH), 0.0)
    batch = asyncio.run(stream.read())
    assert batch is not None
    assert [one.choice for one in batch] == [5, 5, 4]
    stream.close()
    assert not aborted


class Planning:
    """An idle engine whose bucket table has been planned when it is looked at for the third time."""

    has_unfinished = has_disk = False

    def __init__(self) -> None:
        self.num_looks, self.is_taken = 0, threading.Event()

    def stats(self) -> None:
        pass

    def settle_idle(self) -> bool:
        return False

    @property
    def is_planning(self) -> bool:
        return self.num_looks < 3

    def replan_idle(self) -> bool:
        self.num_looks += 1
        if self.num_looks == 3:
            self.is_taken.set()
        return False


def test_an_idle_engine_takes_a_planned_table_without_a_request() -> None:
    engine = Planning()
    thread = async_engine.EngineThread(engine, None, plan_s=0.001)  # type: ignore[arg-type]
    thread.start()
    try:
        assert engine.is_taken.wait(60)
    finally:
        assert thread.stop(60)
