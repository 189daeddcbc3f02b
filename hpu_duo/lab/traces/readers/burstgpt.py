"""BurstGPT: two months and more of ChatGPT and GPT-4 requests of a campus (arXiv:2401.17644; HPMLL/BurstGPT).

CSV with the columns ``Timestamp`` (seconds since the first day's midnight), ``Model``, ``Request tokens``,
``Response tokens``, ``Total tokens`` and ``Log Type``; later releases add ``Session ID`` and ``Elapsed
time``. Failures have 0 response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpu_duo.lab.traces.arrival import Arrival
from hpu_duo.lab.traces.readers.rows import csv_rows

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_burstgpt(path: Path) -> Iterator[Arrival | None]:
    """Yield the requests of a BurstGPT file; None for failures.

    Raises:
        ValueError: the file or a row is not of this format.
    """
    for row in csv_rows(path, COLUMNS):
        prompt, output = row.count("Request tokens"), row.count("Response tokens")
        time = row.number("Timestamp")
        if prompt and output:
            yield Arrival(time, prompt, output, session=row.fields.get("Session ID") or None)
        else:
            yield None
