"""Commands that take long say so on standard error."""

import sys
from threading import Event

import pytest

from hpu_duo.cli.terminal import waiting as module
from hpu_duo.cli.terminal.waiting import waiting


class Stream:
    """Standard error that remembers, and tells when something came."""

    def __init__(self, is_terminal: bool) -> None:
        self.text, self.came, self._is_terminal = "", Event(), is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.text += text
        self.came.set()
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_long_wait_is_told(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    stream = Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(module, "_BLINK_S", 60.0)
    with waiting("searching", silent_s=0):
        assert stream.came.wait(60)
    said = "hpu-duo: searching: 0 s"
    assert stream.text == (f"\r{said}\r{' ' * (len(said) + 1)}\r" if is_terminal else said + "\n")


def test_a_short_wait_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="x"), waiting("searching", silent_s=60):
        raise ValueError("x")
    assert capsys.readouterr().err == ""
