"""The collector of cyclic garbage is paused for a while, and then as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from hpu_duo.garbage import (
    IdleCollector,
    collector_paused,
    leave_out_what_is_there,
    short_collections,
    unfreeze,
)


@pytest.fixture(autouse=True)
def _enabled_again() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()
    leave_out_what_is_there()  # as conftest.py has left it


def test_the_collector_rests_inside_and_runs_again_behind_it() -> None:
    gc.enable()
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with collector_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_pauses_within_pauses_end_with_the_outermost() -> None:
    gc.enable()
    with collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_inside_ends_the_pause() -> None:
    gc.enable()
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


@pytest.mark.parametrize("is_serving", [False, True])
def test_what_came_in_a_pause_is_old_behind_it_and_what_was_left_out_stays_out(is_serving: bool) -> None:
    gc.enable()
    unfreeze()
    if is_serving:
        leave_out_what_is_there()
    with collector_paused():
        kept = [[number] for number in range(5_000)]
    assert (gc.get_freeze_count() > 0) == is_serving
    young = {id(each) for generation in (0, 1) for each in gc.get_objects(generation)}
    assert any(id(each) in young for each in kept) == is_serving


@pytest.mark.parametrize("enabled", [True, False])
def test_the_import_of_the_model_leaves_the_collector_as_it_was(enabled: bool) -> None:
    before = "enable" if enabled else "disable"
    code = f"import gc; gc.{before}(); from hpu_duo import SamplingParams; print(gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(enabled)


def test_what_is_there_is_left_out_of_later_collections() -> None:
    leave_out_what_is_there()
    try:
        assert gc.get_freeze_count() > 1000
    finally:
        unfreeze()


def test_a_process_that_serves_collects_old_objects_when_idle_only() -> None:
    before = gc.get_threshold()
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    collector = IdleCollector()
    gc.enable()
    gc.callbacks.append(note)
    try:
        with short_collections():
            assert gc.get_freeze_count() > 1000
            collections.clear()
            assert not any(collector.tick(is_idle=True) for _ in range(30)), "nothing has come"
            cycles = [[each] for each in range(100_000)]
            for each in cycles:
                each.append(each)  # type: ignore[arg-type]
            assert {0, 1} == set(collections)
            del cycles
            assert not any(collector.tick(is_idle=number % 9 > 0) for number in range(30)), (
                "never for a second"
            )
            assert [collector.tick(is_idle=True) for _ in range(10)].index(True) >= 5
            assert collections[-1] == 2
            assert gc.get_count()[2] == 0
        assert gc.get_threshold() == before
    finally:
        gc.callbacks.remove(note)
        unfreeze()


def test_cycles_that_outlived_idle_collections_are_found_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cycle:
        pass

    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, 1000))
    cycle, collector = Cycle(), IdleCollector(full_every=3)
    cycle.itself = cycle  # type: ignore[attr-defined]
    found = weakref.ref(cycle)
    try:
        with short_collections():
            assert [collector.tick(is_idle=True) for _ in range(10)][-1]
            del cycle
            assert [collector.tick(is_idle=True) for _ in range(10)][-1]
            assert found() is not None, "left out"
            assert any(collector.tick(is_idle=True) for _ in range(10))
            assert found() is None
    finally:
        unfreeze()
