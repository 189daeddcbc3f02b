"""Rank 0 counts for how long each rank has been at an order, but for those of a warm-up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hpu_duo.device import collectives
from hpu_duo.device.heartbeats import Lateness, waits_for_others


def test_only_a_step_that_was_told_and_is_not_done_counts() -> None:
    lateness = Lateness()
    assert lateness.look({1: 0, 2: 0}, 1.0) == {1: 0.0, 2: 0.0}
    lateness.tell(is_limited=False)
    assert lateness.look({1: 0, 2: 0}, 9.0) == {1: 0.0, 2: 0.0}, "a warm-up compiles"
    lateness.tell(is_limited=True)
    assert lateness.look({1: 1, 2: 0}, 2.0) == {1: 0.0, 2: 0.0}
    assert lateness.look({1: 1, 2: 0}, 2.0) == {1: 2.0, 2: 0.0}
    assert lateness.look({1: 1, 2: 1}, 2.0) == {1: 4.0, 2: 0.0}
    lateness.tell(is_limited=True)
    assert lateness.look({1: 2, 2: 1}, 1.0) == {1: 0.0, 2: 1.0}
    assert lateness.look({1: 3, 2: 3}, 1.0) == {1: 0.0, 2: 0.0}
    assert lateness.look({1: 3, 2: 3}, 50.0) == {1: 0.0, 2: 0.0}, "ranks wait for orders"


@contextmanager
def thread_in(work: object) -> Iterator[int]:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    assert thread.ident is not None
    try:
        yield thread.ident
    finally:
        thread.join()


def test_a_thread_waits_for_others_inside_exchanges_alone() -> None:
    arrived, leave = threading.Event(), threading.Event()

    class Blocking:
        def contiguous(self) -> None:
            self.wait()

        @staticmethod
        def wait() -> None:
            arrived.set()
            leave.wait(20)
            raise TimeoutError

    def sums() -> None:
        with suppress(TimeoutError):
            collectives.sum_over_ranks(Blocking(), "")  # type: ignore[arg-type]

    def waits() -> None:
        with suppress(TimeoutError):
            Blocking.wait()

    for work, expected in ((sums, True), (waits, False)):
        arrived.clear()
        leave.clear()
        with thread_in(work) as ident:
            assert arrived.wait(20)
            found = waits_for_others(ident)
            leave.set()
        assert found is expected
    assert not waits_for_others(threading.get_ident())
