"""The kernels that an engine runs, in its statistics and notes."""

from __future__ import annotations

import pytest

from kernels_ref.x86 import library
from tests.engine.tiny import Tiny, make_tiny
from tests.needs import needs_x86_kernels


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def test_a_switch_that_costs_speed_is_a_note(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    library.is_available()  # its result stays
    assert tiny.load(dtype="float32").stats().resolved.computation.endswith("arithmetic float32")
    monkeypatch.setenv(library.SWITCH, "0")
    monkeypatch.setattr(library, "is_available", lambda *_: False)
    stats = tiny.load(dtype="bfloat16").stats()
    assert stats.resolved.kernels.startswith("torch's (")
    assert any(library.SWITCH in note for note in stats.notes)


def test_a_missing_compiler_is_a_note(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_available", lambda *_: False)
    monkeypatch.setattr(library, "lanes", lambda: (8,))
    monkeypatch.setattr(library, "origin", lambda: None)
    assert any(
        "need a C++ compiler, one of g++" in note for note in tiny.load(dtype="bfloat16").stats().notes
    )


def test_kernels_that_could_not_be_built_are_a_note(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_available", lambda *_: False)
    monkeypatch.setattr(library, "lanes", lambda: (8,))
    notes = tiny.load(dtype="float32").stats().notes
    assert any("our kernels could not be built" in note for note in notes)
    assert not any("dtype='auto'" in note for note in notes)


@needs_x86_kernels
def test_our_kernels_are_named_where_a_step_runs_them(tiny: Tiny) -> None:
    assert tiny.load(dtype="float32", attention="sdpa").stats().resolved.kernels.startswith("our kernels (")
    portable = tiny.load(dtype="float32", attention="reference").stats()
    assert portable.resolved.kernels.startswith("torch's (")
