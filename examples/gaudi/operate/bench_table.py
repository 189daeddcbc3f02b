"""Print the results of hpu-duo bench serve side by side: a table with a row for each file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_SETTINGS = (
    *("num_prompts", "request_rate", "burstiness", "input_len", "output_len", "range_ratio", "trace", "seed"),
    *("max_concurrency", "endpoint", "extra_body"),
)
"""Settings that have to be equal, as far as a result has them."""
_COLUMNS = (
    ("completed", "completed", "{:,.0f}"),
    ("failed", "failed", "{:,.0f}"),
    ("request_throughput", "requests/s", "{:,.2f}"),
    ("output_throughput", "output tokens/s", "{:,.1f}"),
    ("median_ttft_ms", "TTFT median ms", "{:,.1f}"),
    ("p99_ttft_ms", "TTFT p99 ms", "{:,.1f}"),
    ("median_tpot_ms", "TPOT median ms", "{:,.2f}"),
    ("p99_tpot_ms", "TPOT p99 ms", "{:,.2f}"),
)


def table(results: dict[str, dict[str, Any]]) -> str:
    """A Markdown table, and a note for every setting that differs."""
    head = ["server", "model", *(title for _, title, _ in _COLUMNS)]
    rows = [
        [
            name,
            str(result.get("model_id", "")),
            *(form.format(result[key]) if key in result else "" for key, _, form in _COLUMNS),
        ]
        for name, result in results.items()
    ]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    for key in (*_SETTINGS, "model_id"):
        values = {name: result.get(key) for name, result in results.items()}
        if len({json.dumps(value, sort_keys=True) for value in values.values()}) > 1:
            told = ", ".join(f"{name} {value}" for name, value in values.items())
            lines.append(f"note: {key} differs, so the rows do not compare: {told}")
    return "\n".join(lines)


def main(paths: list[str]) -> int:
    """Print the table of the files that are there."""
    found = {Path(path).stem: json.loads(Path(path).read_text()) for path in paths if Path(path).exists()}
    if not found:
        print("bench: no result to show", file=sys.stderr)
        return 2
    print(table(found))
    for missing in (path for path in paths if not Path(path).exists()):
        print(f"note: {missing} is not measured yet")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
