"""Commands that take long say so on standard error."""

import re
import sys
from threading import Event

import pytest

from hpu_duo.cli.terminal import Waiting


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
    with Waiting("searching", silent_s=0.01, line_s=60.0) as wait:
        assert stream.came.wait(60)
        stream.came.clear()
        wait.progressed()
        assert stream.came.wait(60)
    said = r"hpu-duo: searching: \d+ s"
    expected = rf"(\r{said}|\r *\r)+" if is_terminal else rf"({said}\n)+"
    assert re.fullmatch(expected, stream.text)
    assert stream.text.endswith(" \r" if is_terminal else "\n")


def test_a_short_wait_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="x"), Waiting("searching", silent_s=60):
        raise ValueError("x")
    assert capsys.readouterr().err == ""
