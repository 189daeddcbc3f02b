"""Azure's LLM inference traces (arXiv:2311.18677, arXiv:2408.00741; Azure/AzurePublicDataset).

CSV with the columns ``TIMESTAMP`` (date and time, in 2023 with seven digits behind the second's point, in
2024 with a time zone), ``ContextTokens`` and ``GeneratedTokens``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from hpu_duo.lab.traces.arrival import Arrival
from hpu_duo.lab.traces.readers.rows import Row, csv_rows

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_TIME = re.compile(
    r"(?P<whole>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?P<fraction>\.\d+)?(?P<zone>Z|[+-]\d\d:?\d\d)?", re.ASCII
)


def read_azure(path: Path) -> Iterator[Arrival | None]:
    """Yield the requests of an Azure file; None for rows without prompt or output.

    Raises:
        ValueError: the file or a row is not of this format.
    """
    for row in csv_rows(path, COLUMNS):
        time = _seconds(row)
        prompt, output = row.count("ContextTokens"), row.count("GeneratedTokens")
        yield Arrival(time, prompt, output) if prompt and output else None


def _seconds(row: Row) -> float:
    """Since 1970; a time without a zone is taken for UTC, and only differences count."""
    text = row.fields["TIMESTAMP"]
    match = _TIME.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        zone = (match["zone"] or "+00:00").replace("Z", "+00:00")
        if ":" not in zone:
            zone = f"{zone[:3]}:{zone[3:]}"
        whole = datetime.fromisoformat(match["whole"].replace("T", " ") + zone).astimezone(timezone.utc)
    except ValueError:
        raise ValueError(
            f"expected a time such as 2023-11-16 18:15:46.6805900 in 'TIMESTAMP', {row.where}, got {text!r}"
        ) from None
    return whole.timestamp() + float(match["fraction"] or 0)
