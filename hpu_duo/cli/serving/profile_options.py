"""Options of a profile of some steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import typer

_PROFILE = "Profile"


class StepProfiler(Protocol):
    """A profiler of consecutive steps, such as ``hpu_duo.watch.step_profiler.StepProfiler``."""

    @property
    def trace(self) -> Path | None:
        """File that was written; None until then."""
        ...

    @property
    def remaining(self) -> int:
        """Steps that are still to be profiled."""
        ...

    def stepped(self) -> None:
        """A step has ended."""
        ...


class MakeProfiler(Protocol):
    """Makes a profiler; it is imported only when one is wanted."""

    def __call__(self, device: str, directory: Path, num_steps: int, num_skipped: int) -> StepProfiler:
        """See ``hpu_duo.watch.step_profiler.StepProfiler``."""
        ...


_plugged: list[MakeProfiler] = []


def plug_in(make: MakeProfiler) -> None:
    """Set what ``ProfileOptions.profiler`` calls; nothing that serves imports a profiler itself."""
    _plugged[:] = [make]


@dataclass(frozen=True)
class ProfileOptions:
    """Options of a profile of some steps; on HPU the vendor's profiler takes part."""

    profile_steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Profile so many steps behind the warm-up, and write one trace.",
            show_default="none",
            rich_help_panel=_PROFILE,
        ),
    ] = None
    profile_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory for the trace.", show_default="none", rich_help_panel=_PROFILE
        ),
    ] = None
    profile_after: Annotated[
        int, typer.Option(help="Steps that are left out before them.", rich_help_panel=_PROFILE)
    ] = 1

    def check(self) -> None:
        """Refuse what does not fit together; needs no torch.

        Raises:
            ValueError: one of steps and directory without the other.
        """
        if (self.profile_steps is None) is not (self.profile_dir is None):
            raise ValueError("expected --profile-steps and --profile-dir together, got one of them")

    def profiler(self, device: str) -> StepProfiler | None:
        """Make the profiler; None if no steps are to be profiled.

        Args:
            device: name of the engine's runtime.

        Raises:
            ValueError: see ``check``, or what the profiler refuses.
        """
        self.check()
        if self.profile_steps is None or self.profile_dir is None:
            return None
        (make,) = _plugged
        return make(device, self.profile_dir, self.profile_steps, self.profile_after)
