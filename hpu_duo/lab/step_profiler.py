"""A profile of some steps of an engine, by torch's profiler and through it the vendor's.

On HPU the profiler's HPU activity is asked for, as vllm-gaudi and optimum-habana do; it is left out with a
warning where the vendor's plug-in does not offer it. Written from public sources; no Gaudi has run it.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, supported_activities

from hpu_duo.writable import check_directory

_log = logging.getLogger(__name__)
_ACTIVITIES = {"hpu": ProfilerActivity.HPU, "cuda": ProfilerActivity.CUDA}
_SKIPPED = 1


class StepProfiler:
    """Profiles consecutive steps and writes one trace, for chrome://tracing, Perfetto or TensorBoard.

    Args:
        device: name of the engine's ``DeviceRuntime``, such as "hpu"; the host is always profiled.
        directory: for the trace; made if it is not there.
        num_steps: steps to profile.
        num_skipped: steps before them, at least 1: the first of an engine is unlike the others.

    Attributes:
        trace: file that was written; None until then.

    Raises:
        ValueError: a number is too small, or the directory cannot be written to.
    """

    def __init__(
        self, device: str, directory: str | Path, num_steps: int, num_skipped: int = _SKIPPED
    ) -> None:
        if num_steps < 1 or num_skipped < 1:
            raise ValueError(
                f"expected at least one step to profile and one before, got {num_steps} and {num_skipped}"
            )
        check_directory("the directory of the profile", Path(directory))
        self._device, self._directory = device, Path(directory)
        self._num_steps, self._num_skipped, self._num_seen = num_steps, num_skipped, 0
        self._profile: profile | None = None
        self.trace: Path | None = None

    @property
    def activities(self) -> list[ProfilerActivity]:
        """Activities that are recorded."""
        own = _ACTIVITIES.get(self._device)
        return [ProfilerActivity.CPU, *([] if own is None else [own])]

    @property
    def remaining(self) -> int:
        """Steps that are still to be profiled; 0 once the trace is written, or could not be."""
        return max(0, self._num_skipped + self._num_steps - self._num_seen)

    def stepped(self) -> None:
        """Note that a step has ended; to be called in the thread that steps, which is the profiled one.

        Raises:
            OSError: the trace cannot be written. It is not tried again.
        """
        self._num_seen += 1
        if self._num_seen == self._num_skipped:
            self._profile = profile(activities=self._offered(), record_shapes=True)
            self._profile.start()
        elif self._num_seen == self._num_skipped + self._num_steps:
            self._write()

    def _offered(self) -> list[ProfilerActivity]:
        """Return the activities that this torch can record; warns of the others."""
        offered = supported_activities()
        for activity in self.activities:
            if activity not in offered:
                _log.warning("torch cannot profile %s here: the host is profiled alone", activity.name)
        return [activity for activity in self.activities if activity in offered]

    def _write(self) -> None:
        ended, self._profile = self._profile, None
        assert ended is not None, self._num_seen
        ended.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"hpu-duo-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}.pt.trace.json.gz"
        ended.export_chrome_trace(str(self._directory / name))
        self.trace = self._directory / name
        _log.warning("wrote the profile of %d steps to %s", self._num_steps, self.trace)
