"""Rows of RULER's report: tasks, and their average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from hpu_duo.lab.eval.answering import means
from hpu_duo.lab.eval.interval import interval_fields
from hpu_duo.lab.eval.kv_bytes import KVBytes


def ruler_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each task and length, and for each length the average over its tasks, as RULER reports it.

    The interval of an average is that of as many answers as all its tasks have together.
    """
    rows = means(records, ("task", "num_tokens"))
    found = []
    for length in dict.fromkeys(row["num_tokens"] for row in rows):
        of_length = [row for row in rows if row["num_tokens"] == length]
        found += of_length
        if len(of_length) > 1:
            answers = [record for record in records if record["num_tokens"] == length]
            found.append(
                {
                    "task": f"average of {len(of_length)}",
                    "num_tokens": length,
                    "num_samples": len(answers),
                    **interval_fields("score", fmean(row["score"] for row in of_length), len(answers)),
                    **KVBytes.total(map(KVBytes.of_record, answers)).report_fields,
                }
            )
    return found
