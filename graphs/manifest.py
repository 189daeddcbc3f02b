"""Manifest of a warm-up, in a file: the table, the cost of each graph, and their configuration.

A JSON object. ``configuration`` is flat: one entry for everything that shapes a graph, so that a difference
can be named. ``digest`` is the SHA-256 of it. ``versions`` are those of the software, which invalidate
costs and not tables.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from graphs.atomic_file import replace_file
from graphs.shape import BatchShape, CostFunction
from graphs.table import BucketTable, PlannedPadding

FORMAT = "hpu-duo warm-up manifest"
VERSION = 1

_MOST_NAMED = 8
_UNBELIEVABLE = 1 << 62
"""Seconds and bytes from which on a file is considered damaged."""
_ABSENT = "nothing"

Configuration = Mapping[str, Any]
"""JSON values by name: numbers, texts, booleans, None, or lists of them."""


@dataclass(frozen=True)
class GraphRecord:
    """One bucket, and the cost of its capture if that has been measured.

    Args:
        shape: the bucket.
        seconds: from the first operator to the end of the first run.
        num_bytes: growth of the process's device memory meanwhile.
        cache: identifier of the compiler's cache on disk that has its code; None without one.
        trace_s: part of ``seconds`` in which torch traced it.
    """

    shape: BatchShape
    seconds: float | None = None
    num_bytes: int | None = None
    cache: str | None = None
    trace_s: float | None = None


@dataclass(frozen=True)
class Manifest:
    """A table and the configuration that it is for.

    Args:
        configuration: everything that shapes a graph, by name.
        versions: of the software that measured.
        graphs: the buckets of the table, each once; captured ones have costs.
        planned_padding: padding that the table was planned for, if known.
    """

    configuration: Configuration
    versions: Mapping[str, str]
    graphs: tuple[GraphRecord, ...]
    planned_padding: PlannedPadding | None = None
    _by_shape: dict[BatchShape, GraphRecord] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_shape", {record.shape: record for record in self.graphs})

    @property
    def is_complete(self) -> bool:
        """Whether every bucket has been captured and measured."""
        return all(record.seconds is not None for record in self.graphs)

    @property
    def digest(self) -> str:
        """SHA-256 of the configuration, in hexadecimal."""
        text = json.dumps(dict(self.configuration), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def phases(self) -> dict[str, int]:
        """Buckets by phase string."""
        return dict(sorted(Counter(str(record.shape.phase) for record in self.graphs).items()))

    def table(self, cost: CostFunction | None = None) -> BucketTable:
        """The buckets; ``cost`` as for ``BucketTable.from_strings``."""
        table = BucketTable.from_strings((str(record.shape) for record in self.graphs), cost)
        return replace(table, planned_padding=self.planned_padding)

    def record_of(self, shape: BatchShape) -> GraphRecord | None:
        """Return the record of a bucket; None for one that is not in the table."""
        return self._by_shape.get(shape)

    def check(self, running: Configuration, versions: Mapping[str, str], *, known_only: bool = False) -> None:
        """Raise ValueError for a configuration that differs from the manifest's.

        Args:
            running: the running configuration.
            versions: of the running software; named in the message, and never an error.
            known_only: compare only the names that ``running`` has.

        Raises:
            ValueError: it differs; the message names each differing entry with both values.
        """
        differing = self.differing(running, known_only=known_only)
        if not differing:
            return
        others = "; ".join(self.differing_versions(versions))
        raise ValueError(
            f"the manifest is {differing}"
            + (f" (it was written by other software: {others})" if others else "")
        )

    def differing(self, running: Configuration, *, known_only: bool = False) -> str:
        """Describe how a configuration differs from the manifest's; empty if it does not.

        Args:
            running, known_only: see ``check``.
        """
        names = sorted(running if known_only else {*running, *self.configuration})
        differing = [
            f"{name}: expected {self.configuration.get(name, _ABSENT)}, got {running.get(name, _ABSENT)}"
            for name in names
            if self.configuration.get(name, _ABSENT) != running.get(name, _ABSENT)
        ]
        if not differing:
            return ""
        more = len(differing) - _MOST_NAMED
        listed = "; ".join(differing[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
        return f"for another configuration, {len(differing)} of its entries differ: {listed}"

    def differing_versions(self, running: Mapping[str, str]) -> list[str]:
        """Describe each piece of ``running`` software whose version differs from the manifest's."""
        return [
            f"{name} {self.versions.get(name, _ABSENT)} then, {running[name]} now"
            for name in sorted(running)
            if self.versions.get(name) != running[name]
        ]


def write_manifest(path: str | Path, manifest: Manifest) -> None:
    """Write a manifest atomically.

    Raises:
        ValueError: the file cannot be written.
    """
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "is_complete": manifest.is_complete,
        "digest": manifest.digest,
        "versions": dict(manifest.versions),
        "configuration": dict(manifest.configuration),
        "phases": manifest.phases,
        "promise": None if manifest.planned_padding is None else str(manifest.planned_padding),
        "graphs": [
            {
                "shape": str(record.shape),
                "seconds": record.seconds,
                "bytes": record.num_bytes,
                "trace_seconds": record.trace_s,
                "cache": record.cache,
            }
            for record in manifest.graphs
        ],
    }
    target = Path(path)
    try:
        replace_file(target, json.dumps(fields, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ValueError(f"cannot write the manifest {target}: {error.strerror}") from error


def is_manifest(path: str | Path) -> bool:
    """Whether a file of shapes is a manifest: it starts like JSON, as no table does."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            return file.read(4096).lstrip().startswith("{")
    except (OSError, UnicodeDecodeError):
        return False


def read_manifest(path: str | Path) -> Manifest:
    """Read a manifest.

    Raises:
        ValueError: the file cannot be read, is no manifest, was written by a newer version, was changed after
            it was written, or has a wrong entry; the message says which.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot read a manifest from {path}: {reason}") from error
    try:
        fields = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a warm-up manifest in {path}, which is not JSON: {error}") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        found = fields.get("format") if isinstance(fields, dict) else type(fields).__name__
        raise ValueError(f'expected a warm-up manifest in {path}, with "format": "{FORMAT}", got {found!r}')
    version = fields.get("version")
    if type(version) is int and version > VERSION:
        raise ValueError(
            f"expected a manifest of format version {VERSION} or older in {path}, got {version}: it was "
            "written by a newer HPU-Duo; update this one, or warm up again"
        )
    try:
        manifest = _parse(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if fields["digest"] != manifest.digest:
        raise ValueError(
            f"{path} was changed after it was written: expected a configuration with digest "
            f"{fields['digest']!r}, got {manifest.digest!r}; warm up again"
        )
    return manifest


def _parse(fields: dict[str, Any]) -> Manifest:
    _expect(fields.get("version") == VERSION, "version", "1", fields.get("version"))
    for name, kind in (
        ("digest", str),
        ("versions", dict),
        ("configuration", dict),
        ("graphs", list),
    ):
        _expect(type(fields.get(name)) is kind, name, f"a {kind.__name__}", fields.get(name))
    for name, version in fields["versions"].items():
        _expect(isinstance(version, str), f"versions.{name}", "a text", version)
    records = tuple(_record(f"graphs[{number}]", item) for number, item in enumerate(fields["graphs"]))
    _expect(bool(records), "graphs", "at least one", "none")
    repeated = [shape for shape, count in Counter(record.shape for record in records).items() if count > 1]
    _expect(not repeated, "graphs", "each shape once", ", ".join(map(str, repeated)))
    return Manifest(
        fields["configuration"], fields["versions"], records, _planned_padding(fields.get("promise"))
    )


def _planned_padding(text: Any) -> PlannedPadding | None:
    """The planned padding of a table; manifests of older versions have none."""
    found = PlannedPadding.find(text) if isinstance(text, str) else None
    _expect(
        text is None or found is not None, "promise", 'a text such as "padding: 0.1 by StepSeconds"', text
    )
    return found


def _record(name: str, item: Any) -> GraphRecord:
    _expect(isinstance(item, dict) and isinstance(item.get("shape"), str), name, 'a "shape"', item)
    seconds, num_bytes = item.get("seconds"), item.get("bytes")
    trace_s = item.get("trace_seconds")
    for key, value in (("seconds", seconds), ("trace_seconds", trace_s)):
        # Comparisons do not convert, so integers may have any length.
        is_time = type(value) in (int, float) and 0 <= value < _UNBELIEVABLE
        _expect(value is None or is_time, f"{name}.{key}", "0 or more, or null", value)
    is_size = type(num_bytes) is int and abs(num_bytes) < _UNBELIEVABLE
    _expect(num_bytes is None or is_size, f"{name}.bytes", "an integer or null", num_bytes)
    cache = item.get("cache")
    _expect(cache is None or isinstance(cache, str), f"{name}.cache", "a text or null", cache)
    try:
        shape = BatchShape.parse(item["shape"])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    times = [None if value is None else float(value) for value in (seconds, trace_s)]
    return GraphRecord(shape, times[0], num_bytes, cache, times[1])


def _expect(is_so: bool, name: str, expected: str, got: Any) -> None:
    if not is_so:
        raise ValueError(f"expected {name} to be {expected}, got {got!r}")


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")
