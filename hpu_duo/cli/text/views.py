"""Views of prompts that run."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from hpu_duo.engine.outputs import RequestOutput


class LiveView:
    """A progress bar while prompts are prefilled, then text as it comes.

    Args:
        console: where the bar is drawn, if it is a terminal; the bar goes away when it is full.
        text: where the output of the only prompt goes; None to write nothing.

    Attributes:
        is_streamed: whether text is written as it comes.
    """

    def __init__(self, console: Console, text: TextIO | None) -> None:
        self._console = console
        self._text = text
        self.is_streamed = text is not None
        self._bar: Progress | None = None
        self._wrote = False

    def prefilled(self, done: int, total: int) -> None:
        """Draw the bar, from the first step that leaves something to prefill to the last."""
        if done >= total:
            self._close_bar()
        elif self._console.is_terminal:
            self._draw(done, total)

    def received(self, index: int, output: RequestOutput) -> None:
        """Write new text at once."""
        if self._text is not None and output.text:
            self._close_bar()
            # First, for an interrupt may come at any moment after the text has been seen.
            self._wrote = True
            self._text.write(output.text)
            self._text.flush()

    def ended(self) -> None:
        """Leave the cursor at the start of a line."""
        self._close_bar()
        if self._text is not None and self._wrote:
            self._text.write("\n")
            self._text.flush()

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("prefill"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("tokens"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.add_task("prefill", total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
