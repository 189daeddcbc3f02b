"""Rows of a file with their line numbers, and numbers in them, with errors that name the place."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One record of a trace.

    Attributes:
        where: file and line, for messages.
        fields: by their names in the file.
    """

    where: str
    fields: Mapping[str, Any]

    def number(self, name: str) -> float:
        """Return a field as a finite number; ValueError if it is none."""
        value = self.fields.get(name)
        try:
            if isinstance(value, bool) or value is None:
                raise ValueError
            number = float(value)
            if not math.isfinite(number):
                raise ValueError
        except (TypeError, ValueError):
            raise ValueError(f"expected a number in {name!r}, {self.where}, got {value!r}") from None
        return number

    def count(self, name: str) -> int:
        """Return a field as a whole number of at least 0; ValueError if it is none."""
        number = self.number(name)
        if number < 0 or number != int(number):
            raise ValueError(
                f"expected a whole number of at least 0 in {name!r}, {self.where}, got {self.fields[name]!r}"
            )
        return int(number)


def csv_rows(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    """Read a CSV file with a head line that names at least ``columns``.

    Raises:
        ValueError: a column is missing, a row has more or fewer fields than the head line, or the file is not
            text.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        try:
            head = [name.strip() for name in next(reader, [])]
            missing = [name for name in columns if name not in head]
            if missing:
                raise ValueError(
                    f"expected the columns {', '.join(columns)} in {path}, got {', '.join(head)!r}"
                )
            for values in reader:
                where = f"line {reader.line_num} of {path}"
                if not values:
                    continue
                if len(values) != len(head):
                    raise ValueError(f"expected {len(head)} fields in {where}, got {len(values)}")
                yield Row(where, dict(zip(head, values)))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read line {reader.line_num + 1} of {path} as CSV: {error}") from None


def json_lines(path: Path) -> Iterator[Row]:
    """Read one JSON object per line; empty lines are passed over.

    Raises:
        ValueError: a line is something else.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"line {number} of {path}"
            try:
                fields = json.loads(line)
            except ValueError:
                fields = None
            if not isinstance(fields, dict):
                raise ValueError(f"expected a JSON object in {where}, got {line[:40]!r}")
            yield Row(where, fields)
