"""Points as they are measured, in a JSON file that a later run continues."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from graphs.atomic_file import replace_file

_PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flashinfer-python", "numpy")


class Key(NamedTuple):
    """Key of a point: section, case in it, and the system that was measured."""

    section: str
    case: str
    system: str


@dataclass(frozen=True)
class Point:
    """One measurement, or the reason why there is none.

    Attributes:
        key: of the point.
        values: by name; seconds end in ``_s``, bytes in ``_bytes``, arithmetic in ``flops``.
        note: why there are no values; empty for a measurement.
    """

    key: Key
    values: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether there are values."""
        return bool(self.values)


class Results:
    """All points of one dated run, saved after each of them.

    Args:
        path: JSON file; read if it is there.
        environment: hardware and software of the measurements; a file of another environment is refused.

    Raises:
        ValueError: the file is from another environment or cannot be read.
    """

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self.path, self.environment = path, dict(environment)
        self._points: dict[Key, Point] = {}
        if not path.exists():
            return
        try:
            stored = json.loads(path.read_text())
            found, points = stored["environment"], stored["points"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"expected results of this script in {path}, got: {error!r}") from error
        for name in sorted({*found, *self.environment}):
            if found.get(name) != self.environment.get(name):
                raise ValueError(
                    f"{path} was measured with {name}={found.get(name)!r}, and this is "
                    f"{self.environment.get(name)!r}; give another --out"
                )
        for entry in points:
            self._points[Key(*entry["key"])] = Point(Key(*entry["key"]), entry["values"], entry["note"])

    def is_measured(self, key: Key) -> bool:
        """Whether there is a measurement of that key; a note instead of one does not count."""
        return key in self._points and self._points[key].is_measured

    def get(self, key: Key) -> Point | None:
        """The point of that key, if there is one."""
        return self._points.get(key)

    def of(self, section: str) -> list[Point]:
        """Points of a section, in the order in which they were added."""
        return [point for point in self._points.values() if point.key.section == section]

    def add(self, point: Point) -> None:
        """Add a point, replacing an older one of its key, and save all."""
        self._points[point.key] = point
        content = {
            "environment": self.environment,
            "points": [asdict(point) for point in self._points.values()],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Never half a file: a run may be stopped at any time.
        replace_file(self.path, json.dumps(content, indent=1) + "\n")


def describe_environment(device: torch.device, *, is_toy: bool) -> dict[str, str]:
    """Hardware and versions, as text."""
    found = {"python": platform.python_version(), "sizes": "toy" if is_toy else "real"}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    if device.type != "cuda":
        return {"device": f"{device.type} ({platform.machine()})", **found}
    about = torch.cuda.get_device_properties(device)
    return {
        "device": about.name,
        "device memory": f"{about.total_memory / (1 << 30):.1f} GiB",
        "multiprocessors": str(about.multi_processor_count),
        "cuda": str(torch.version.cuda),
        **found,
    }
