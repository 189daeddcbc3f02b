"""Ctrl-C at any line of the engine costs nobody a token; `interrupts.py` itself."""

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

import hpu_duo
from hpu_duo.engine.interrupts import interrupts_deferred
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import PATTERN, Tiny, assert_holds_nothing
from tests.modeling.families import prompts_of

HOST_SIDE = tuple(str(Path(hpu_duo.__file__).parent / name) for name in ("engine", "kv", "request.py"))
PARAMS = SamplingParams(temperature=1.3, seed=4, max_tokens=12, n=2)


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    """Tests may run where the signal is ignored, as shells do to what they start in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def ctrl_c_at_a_line(seed: int) -> Iterator[None]:
    """Press Ctrl-C once, before a line of the host side that is drawn at random."""
    left = random.Random(seed).randrange(1, 4000)

    def press(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return press

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return press if frame.f_code.co_filename.startswith(HOST_SIDE) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("seed", range(12))
def test_ctrl_c_at_any_line_of_a_step_costs_nobody_a_token(tiny: Tiny, seed: int) -> None:
    prompts = prompts_of([30, 9, 1, 22])
    # Few blocks, so that requests are preempted; two samples of each prompt fork its cache.
    options = {"pattern": PATTERN, "num_blocks": 16}
    served, undisturbed = tiny.load(**options), tiny.load(**options)
    expected = [
        [sample.token_ids for sample in done] for done in undisturbed.engine.generate(prompts, PARAMS)
    ]
    engine = served.engine
    tokens: dict[str, list[list[int]]] = {engine.add_request(one, PARAMS): [[], []] for one in prompts}
    num_interrupts = 0
    while engine.has_unfinished:
        try:
            with ctrl_c_at_a_line(seed * 1000 + num_interrupts):
                while engine.has_unfinished:
                    for output in engine.step():
                        tokens[output.request_id][output.sample_index] += output.token_ids
        except KeyboardInterrupt:
            num_interrupts += 1
    assert list(tokens.values()) == expected
    assert num_interrupts >= 3
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
