"""A trace in a file, whatever its format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hpu_duo.lab.traces.arrival import Arrival, in_order
from hpu_duo.lab.traces.readers import azure, burstgpt
from hpu_duo.lab.traces.readers.mooncake import read_mooncake
from hpu_duo.lab.traces.readers.sharegpt import read_sharegpt

_HEAD_BYTES = 4096


class TraceFormat(Enum):
    """Formats that are read; the values are their names for users."""

    BURSTGPT = "burstgpt"
    AZURE = "azure"
    MOONCAKE = "mooncake"
    SHAREGPT = "sharegpt"

    @classmethod
    def parse(cls, name: str) -> TraceFormat:
        """Return the format of that name; ValueError with all names for another one."""
        try:
            return cls(name)
        except ValueError:
            names = ", ".join(each.value for each in cls)
            raise ValueError(f"expected a trace format among {names}, got {name!r}") from None

    @classmethod
    def of(cls, path: Path) -> TraceFormat:
        """Find out the format of a file by its first bytes.

        Raises:
            ValueError: it is none of them.
            OSError: the file cannot be read.
        """
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
        columns = {name.strip().strip(b'"').decode("latin-1") for name in head.split(b"\n")[0].split(b",")}
        if head.startswith(b"["):
            return cls.SHAREGPT
        if head.startswith(b"{"):
            return cls.MOONCAKE
        if columns.issuperset(burstgpt.COLUMNS):
            return cls.BURSTGPT
        if columns.issuperset(azure.COLUMNS):
            return cls.AZURE
        names = ", ".join(each.value for each in cls)
        raise ValueError(f"expected {path} to be a trace of one of the formats {names}, got {head[:60]!r}")


@dataclass(frozen=True)
class TraceFile:
    """The requests of a file.

    Attributes:
        format: of the file.
        arrivals: in order of time, from 0 s on; those of the same time in the order of the file.
        num_skipped: rows that are no served request, such as failures.
    """

    format: TraceFormat
    arrivals: tuple[Arrival, ...]
    num_skipped: int

    @property
    def has_times(self) -> bool:
        """Whether the format has times."""
        return self.format is not TraceFormat.SHAREGPT


def read_trace(
    path: Path,
    trace_format: TraceFormat | None = None,
    *,
    limit: int | None = None,
    count_tokens: Callable[[str], int] | None = None,
) -> TraceFile:
    """Read a trace.

    Args:
        trace_format: None detects it.
        limit: most requests to read, from the beginning of the file on; the rest of it is not read.
        count_tokens: counts the tokens of a text; for ShareGPT, which has no lengths.

    Raises:
        ValueError: an unknown format, a row that is not of its format, ShareGPT without
            ``count_tokens``, no request at all, or a file that cannot be read.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"expected limit of at least 1, got {limit}")
    found: list[Arrival] = []
    num_skipped = 0
    try:
        kind = trace_format or TraceFormat.of(path)
        for each in _rows(path, kind, count_tokens):
            if each is None:
                num_skipped += 1
                continue
            found.append(each)
            if len(found) == limit:
                break
    except OSError as error:
        raise ValueError(f"cannot read the trace {path}: {error.strerror}") from error
    if not found:
        raise ValueError(f"expected at least one served request in {path}, got none in {num_skipped} rows")
    return TraceFile(kind, tuple(in_order(found)), num_skipped)


def _rows(
    path: Path, kind: TraceFormat, count_tokens: Callable[[str], int] | None
) -> Iterator[Arrival | None]:
    match kind:
        case TraceFormat.BURSTGPT:
            return burstgpt.read_burstgpt(path)
        case TraceFormat.AZURE:
            return azure.read_azure(path)
        case TraceFormat.MOONCAKE:
            return read_mooncake(path)
        case TraceFormat.SHAREGPT:
            if count_tokens is None:
                raise ValueError(f"expected a tokenizer (--tokenizer): {path} has texts and no lengths")
            return read_sharegpt(path, count_tokens)
