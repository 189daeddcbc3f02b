"""Steps of one model side by side: a layer of each of them, then the next layer of each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any

import torch

from graphs.interrupts import interrupts_deferred
from hpu_duo.engine.zigzag.waiting import WaitingOnHost
from hpu_duo.modeling.attention import RunningStep
from hpu_duo.not_picklable import NotPicklable
from kernels_ref import Step


class _Abandoned(BaseException):
    """Ends the thread of a step that nobody waits for any more; nothing of transformers catches it."""


class _Lane:
    """A step in a thread, which stops in front of each layer."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._asked: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._future: Future[torch.Tensor] | None = None

    def begin(
        self, threads: ThreadPoolExecutor, step: Callable[[], torch.Tensor]
    ) -> Callable[[], Any] | None:
        """Run up to the first layer, and return it."""
        with interrupts_deferred():
            self._future = threads.submit(self._run, step)
        return self._wait()

    def go_on(self, answer: Any) -> Callable[[], Any] | None:
        """Run on behind a layer that has returned ``answer``; None if the step has ended."""
        self._answers.put(answer)
        return self._wait()

    def turn(self, layer: Callable[[], Any]) -> Any:
        """Give a layer to the caller's thread, and return its result; called in the step's thread."""
        self._asked.put(layer)
        answer = self._answers.get()
        if answer is _Abandoned:
            raise _Abandoned
        return answer

    def result(self) -> torch.Tensor:
        """Return what the step has returned, or raise its error."""
        assert self._future is not None, "the step has begun"
        return self._future.result()

    def abandon(self) -> None:
        """Have the thread end in front of its next layer, if it has not ended."""
        self._answers.put(_Abandoned)

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._future is not None:
            wait([self._future])

    def _run(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            # Without a CUDA device the stream is None, and entering it does nothing.
            with torch.cuda.stream(self._stream), torch.inference_mode():
                return step()
        finally:
            self._asked.put(None)

    def _wait(self) -> Callable[[], Any] | None:
        layer = self._asked.get()
        if layer is None:
            self.result()
        return layer


class LayerTurns(NotPicklable):
    """Runs several steps of a model at once, whose layers take turns.

    What transformers' model computes around its layers runs in a thread for each step. The caller's thread
    runs the layers, and one thread runs at a time.

    Args:
        running: the step that the model runs, which is exchanged with each turn.
        num_steps: most steps at once.
        device: of the model.
        waiting: hidden states of steps that lie on the host while others run a layer; None = none do.

    Attributes:
        waiting: see the argument.
    """

    def __init__(
        self,
        running: RunningStep,
        num_steps: int,
        device: torch.device,
        waiting: WaitingOnHost | None = None,
    ) -> None:
        self._running, self._device, self.waiting = running, device, waiting
        self._threads = ThreadPoolExecutor(num_steps, "hpu-duo-turns")

    def run(
        self, steps: Sequence[Callable[[], torch.Tensor]], enter: Callable[[int], None]
    ) -> list[torch.Tensor]:
        """Run all steps, and return their results.

        Args:
            enter: called with the number of a step before anything of it runs.

        Raises:
            Exception: of a step or a layer; all other steps have ended then.
        """
        is_cuda = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if is_cuda else None
        running, lanes, waiting = self._running, [_Lane(stream) for _ in steps], self.waiting
        layers: list[Callable[[], Any] | None] = []
        contexts: list[Step | None] = []
        try:
            for number, (lane, step) in enumerate(zip(lanes, steps)):
                enter(number)
                running.turn = lane.turn
                layers.append(lane.begin(self._threads, step))
                contexts.append(running.step)
                if waiting is not None and number:  # the first one has its turn next
                    waiting.leave(number, layers[number])
            while any(layer is not None for layer in layers):
                # Of a layer's calls only the list has references, so that its inputs go when they have left.
                for number, lane in enumerate(lanes):
                    if (layer := layers[number]) is None:
                        continue
                    enter(number)
                    if waiting is not None:
                        waiting.enter(number)
                        waiting.fetch((number + 1) % len(lanes))
                    running.step, running.turn = contexts[number], None
                    answer = layer()
                    running.turn = lane.turn
                    layers[number] = lane.go_on(answer)
                    contexts[number] = running.step
                    if waiting is not None:
                        waiting.leave(number, layers[number])
            return [lane.result() for lane in lanes]
        finally:
            with interrupts_deferred():
                for lane in lanes:
                    lane.abandon()
                for lane in lanes:
                    lane.join()
                running.step = running.turn = None
                if waiting is not None:
                    waiting.forget()
