"""Ctrl-C at any line of the host side costs nobody a token; `graphs/interrupts.py` itself."""

import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import graphs
import hpu_duo
import kernels_ref
from graphs import BatchShape, BucketTable, StepCost
from graphs.backends import replay
from graphs.backends.compile import CompileBackend, cpu_compile_problem
from graphs.backends.replay import TracedStep
from graphs.interrupts import interrupts_deferred
from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, assert_holds_nothing, serve, tokens_of
from tests.modeling.families import prompts_of
from tests.tiers import further

PACKAGES = [str(Path(str(package.__file__)).parent) for package in (hpu_duo, graphs, kernels_ref)]
HOST_SIDE = tuple(f"{PACKAGES[0]}/{name}" for name in ("engine", "kv", "request.py"))
PARAMS = SamplingParams(temperature=1.3, seed=4, max_tokens=12, n=2)
PROMPTS = prompts_of([30, 9, 1, 22])
OPTIONS: dict[str, Any] = {"pattern": PATTERN, "num_blocks": 16}
"""Few blocks, so that requests are preempted; two samples of each prompt fork its cache."""


@pytest.fixture(autouse=True)
def _ctrl_c_raises() -> Iterator[None]:
    # Shells let what they start in the background ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def ctrl_c_at_line(number: int, where: tuple[str, ...] = HOST_SIDE) -> Iterator[None]:
    """Press Ctrl-C once, before the ``number``-th line that runs in some files."""
    left = number

    def press(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return press

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return press if frame.f_code.co_filename.startswith(where) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def serve_and_interrupt(
    served: HPUDuoModel, draw: random.Random, max_lines: int, where: tuple[str, ...] = HOST_SIDE
) -> tuple[list[list[list[int]]], int]:
    """Tokens of the prompts, and how often Ctrl-C came."""
    engine = served.engine
    tokens: dict[str, list[list[int]]] = {engine.add_request(one, PARAMS): [[], []] for one in PROMPTS}
    num_interrupts = 0
    while engine.has_unfinished:
        try:
            with ctrl_c_at_line(draw.randint(1, max_lines), where):
                while engine.has_unfinished:
                    for output in engine.step():
                        tokens[output.request_id][output.sample_index] += output.token_ids
        except KeyboardInterrupt:
            num_interrupts += 1
            assert num_interrupts < 1000, "no step comes to its end"
    assert_holds_nothing(served)
    return list(tokens.values()), num_interrupts


@pytest.mark.parametrize(
    "seed",
    [
        0,
        1,
        *further(*range(2, 12)),
    ],
)
def test_ctrl_c_at_any_line_of_a_step_costs_nobody_a_token(tiny: Tiny, seed: int) -> None:
    expected = tokens_of(serve(tiny.load(**OPTIONS), PROMPTS, PARAMS))
    tokens, num_interrupts = serve_and_interrupt(tiny.load(**OPTIONS), random.Random(seed), 4000)
    assert tokens == expected
    assert num_interrupts >= 3


@pytest.mark.slow
@pytest.mark.skipif(cpu_compile_problem() is not None, reason="inductor finds no C++ compiler")
@pytest.mark.parametrize(
    "guards", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["replayed", "guards"]
)
def test_ctrl_c_in_compiled_steps_is_a_keyboard_interrupt_too(tiny: Tiny, guards: bool) -> None:
    table = BucketTable((BatchShape.parse("csu/q16/s16/u16/l4"),), StepCost())
    options = {**OPTIONS, "attention": "sdpa", "graphs": CompileBackend(guards=guards), "buckets": table}
    expected = tokens_of(serve(tiny.load(**options), PROMPTS, PARAMS))
    served = tiny.load(**options)
    served.warmup()
    draw = random.Random(3)
    for _ in range(6):
        tokens, num_interrupts = serve_and_interrupt(served, draw, 20000, tuple(PACKAGES))
        assert tokens == expected
        assert num_interrupts >= 2


def test_no_half_trace_stays_behind_a_ctrl_c() -> None:
    inputs = {"x": torch.arange(4.0)}
    expected = (inputs["x"] + 1) * 2

    def double(args: list[torch.Tensor]) -> tuple[torch.Tensor]:
        return (args[0] * 2,)

    num_interrupts = 0
    for line in range(1, 80):
        step: TracedStep[torch.Tensor] = TracedStep(
            lambda inputs: replay.call_compiled(double, (inputs["x"] + 1,))[0]
        )
        try:
            with ctrl_c_at_line(line, (str(replay.__file__),)):
                step(inputs)
        except KeyboardInterrupt:
            num_interrupts += 1
        for _ in range(3):
            assert torch.equal(step(inputs), expected)
        assert step.is_replayed
    assert num_interrupts >= 50


@pytest.mark.parametrize("seed", [0, *further(1, 2, 3)])
def test_an_interrupted_generate_leaves_nothing_behind_and_takes_nothing_from_others(
    tiny: Tiny, seed: int
) -> None:
    expected = tokens_of(serve(tiny.load(**OPTIONS), PROMPTS[:1], PARAMS))
    served = tiny.load(**OPTIONS)
    engine, draw = served.engine, random.Random(seed)
    for _ in range(25):
        other = engine.add_request(PROMPTS[0], PARAMS)
        tokens: list[list[int]] = [[], []]
        line = round(2 ** draw.uniform(0, 12))  # early ones as often: there requests are added
        with pytest.raises(KeyboardInterrupt), ctrl_c_at_line(line):
            engine.generate(PROMPTS[1:], PARAMS)
        while engine.has_unfinished:
            for output in engine.step():
                assert output.request_id == other
                tokens[output.sample_index] += output.token_ids
        assert tokens == expected[0]
        assert_holds_nothing(served)


def interrupted(done: list[str]) -> None:
    with interrupts_deferred(), interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        done.append("inside")
    done.append("behind")


def test_an_interrupt_waits_for_the_end_of_the_outermost_region() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(done)
    assert done == ["inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupted_and_failed() -> None:
    with interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        raise LookupError("inside")


def test_a_failure_inside_stays_with_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted_and_failed()
    assert isinstance(caught.value.__context__, LookupError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupted_twice(done: list[str]) -> None:
    with interrupts_deferred(only_first=True):
        signal.raise_signal(signal.SIGINT)
        done.append("after the first")
        signal.raise_signal(signal.SIGINT)
        done.append("after the second")


def test_a_second_interrupt_takes_effect_at_once_if_asked_for() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_twice(done)
    assert done == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupted_where_lifted(done: list[str]) -> None:
    with interrupts_deferred() as outer:
        handler = signal.getsignal(signal.SIGINT)
        with outer.lifted():
            assert signal.getsignal(signal.SIGINT) == handler
            with interrupts_deferred():
                assert signal.getsignal(signal.SIGINT) == handler
                signal.raise_signal(signal.SIGINT)
                done.append("inside")
            done.append("behind")


def test_an_inner_region_defers_where_the_outer_one_is_lifted_and_sets_no_handler() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_where_lifted(done)
    assert done == ["inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_handles_the_signal_otherwise_is_called_once_at_the_end() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    with interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert calls == []
    assert calls == [signal.SIGINT]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL], ids=["ignored", "default"])
def test_signals_that_no_python_code_handles_are_left_alone(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    with interrupts_deferred():
        assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_are_never_interrupted_and_change_no_handler() -> None:
    seen: list[Any] = []

    def work() -> None:
        with interrupts_deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
