"""The collector of cyclic garbage is paused for a while, and then as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hpu_duo.garbage import collector_paused, leave_out_what_is_there


@pytest.fixture(autouse=True)
def _enabled_again() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


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
        gc.unfreeze()
