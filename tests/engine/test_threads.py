"""Threads that share a model get what each of them would get alone, and are served in the same steps."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpu_duo.engine.outputs import FairLock, RequestOutput
from hpu_duo.request import FinishReason
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, assert_holds_nothing, serve, tokens_of
from tests.modeling.families import prompts_of

NUM_THREADS = 6


@pytest.fixture(autouse=True)
def _threads_change_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], None], num_threads: int = NUM_THREADS) -> None:
    """Run it in several threads that begin at once; the first failure is raised."""
    together = threading.Barrier(num_threads)

    def begin(number: int) -> None:
        together.wait()
        work(number)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(begin, range(num_threads)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", [pytest.param(None, marks=pytest.mark.exhaustive), PATTERN], ids=["full", "duo"]
)
def test_calls_of_several_threads_get_the_tokens_of_each_alone(tiny: Tiny, pattern: object) -> None:
    draw = random.Random(5)
    num_calls = 8 * NUM_THREADS
    prompts = prompts_of([draw.randint(1, 40) for _ in range(num_calls)], 5)
    params = [
        SamplingParams(temperature=1.2, seed=number, max_tokens=draw.randint(1, 12), n=draw.randint(1, 2))
        for number in range(num_calls)
    ]
    expected = tokens_of(serve(tiny.load(pattern=pattern), prompts, params))
    # Few blocks, so that threads preempt each other's requests.
    served = tiny.load(pattern=pattern, num_blocks=16, max_model_len=64)

    def work(thread: int) -> None:
        for number in range(thread, num_calls, NUM_THREADS):
            seen: dict[int, list[int]] = {}

            def on_output(output: RequestOutput, seen: dict[int, list[int]] = seen) -> None:
                seen.setdefault(output.sample_index, []).extend(output.token_ids)

            done = served.engine.generate([prompts[number]], params[number], on_output)
            assert tokens_of(done) == [expected[number]]
            assert [seen[index] for index in sorted(seen)] == expected[number]

    in_threads(work)
    assert not served.engine.has_unfinished
    assert_holds_nothing(served)


def test_threads_that_do_different_things_do_not_disturb_each_other(tiny: Tiny) -> None:
    prompts = prompts_of([21, 7, 12])
    params = SamplingParams(temperature=1.2, seed=1, max_tokens=9, ignore_eos=True)
    expected = tokens_of(serve(tiny.load(), prompts, params))
    alone = tiny.load()
    tensor = alone.generate([prompts[0]], max_new_tokens=6).tolist()
    scores = alone.score([prompts[1]], [[[3, 4], [5]]])
    served = tiny.load()
    engine = served.engine

    def generate() -> None:
        assert tokens_of(engine.generate(prompts, params)) == expected

    def generate_tensor() -> None:
        assert served.generate([prompts[0]], max_new_tokens=6).tolist() == tensor

    def score() -> None:
        [got], [wanted] = served.score([prompts[1]], [[[3, 4], [5]]]), scores
        assert [one.is_likeliest for one in got] == [one.is_likeliest for one in wanted]
        assert [one.logprob for one in got] == pytest.approx([one.logprob for one in wanted], rel=1e-4)

    def step() -> None:
        # The only thread that steps by hand gets all of what it has added.
        name = engine.add_request(prompts[2], params)
        tokens: list[int] = []
        finished = False
        while not finished:
            for output in engine.step():
                if output.request_id == name:
                    tokens += output.token_ids
                    finished = output.is_finished
        assert tokens == expected[2][0]

    def add_and_abort() -> None:
        name = engine.add_request(prompts[2], params)
        served.stats()
        engine.abort(name)

    jobs = [generate, generate_tensor, score, step, add_and_abort]
    in_threads(lambda number: [jobs[number]() for _ in range(4)] and None, len(jobs))
    while engine.has_unfinished:
        engine.step()
    assert_holds_nothing(served)


def test_a_call_joins_the_batch_of_one_that_is_under_way(tiny: Tiny) -> None:
    served = tiny.load()
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    short = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    has_begun, order = threading.Event(), list[str]()

    def long_call() -> None:
        served.engine.generate([prompts_of([5])[0]], params, lambda _: has_begun.set())
        order.append("long")

    def short_call() -> None:
        has_begun.wait()
        served.engine.generate([prompts_of([7])[0]], short)
        order.append("short")

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(long_call), pool.submit(short_call)]:
            future.result()
    assert order == ["short", "long"]
    # 63 tokens and two prompts: decodes of both have shared steps.
    assert served.stats().num_steps < 63


def test_a_refused_call_of_one_thread_leaves_the_others_alone(tiny: Tiny) -> None:
    [prompt] = prompts_of([9])
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    expected = tokens_of(serve(tiny.load(), [prompt], params))
    served = tiny.load()

    def work(number: int) -> None:
        for _ in range(5):
            if number % 2:
                with pytest.raises(ValueError, match="prompt"):
                    served.engine.generate([prompt, []], params)
            else:
                assert tokens_of(served.engine.generate([prompt], params)) == expected

    in_threads(work)
    assert_holds_nothing(served)


def test_a_thread_may_abort_what_another_one_generates(tiny: Tiny) -> None:
    served = tiny.load()
    names: list[str] = []
    has_begun = threading.Event()

    def on_output(output: RequestOutput) -> None:
        names.append(output.request_id)
        has_begun.set()

    def abort() -> None:
        has_begun.wait()
        served.engine.abort(names[0])

    with ThreadPoolExecutor(1) as pool:
        aborting = pool.submit(abort)
        [[done]] = served.engine.generate(
            prompts_of([5]), SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True), on_output
        )
        aborting.result()
    assert done.finish_reason is FinishReason.ABORT
    assert len(done.token_ids) < 80
    assert_holds_nothing(served)


def test_no_thread_gets_a_second_turn_while_another_one_waits() -> None:
    turns, is_taken = FairLock(), threading.Event()
    order: list[str] = []

    def wait() -> None:
        is_taken.set()
        with turns:
            order.append("waited")

    with turns, turns:
        other = threading.Thread(target=wait)
        other.start()
        is_taken.wait()
        while turns._next.acquire(blocking=False):  # until the other one is next
            turns._next.release()
    with turns:
        order.append("second turn")
    other.join()
    assert order == ["waited", "second turn"]
