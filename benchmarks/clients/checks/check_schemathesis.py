"""schemathesis: calls made from the OpenAPI schema, and answers held against it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from told import Told, expect

MAX_EXAMPLES = 150
EXCLUDED = ("positive_data_acceptance",)
"""A schema cannot say what fields mean together: 400 is the right answer to many a call that keeps to it."""


def main() -> None:
    """Check that no call of any phase met a failure."""
    told = Told()
    report = told.folder / "schemathesis.json"
    command = [str(Path(sys.executable).parent / "st"), "run", f"{told.url}/openapi.json", "--checks", "all"]
    options = {
        "--exclude-checks": ",".join(EXCLUDED),
        "--max-examples": MAX_EXAMPLES,
        "--seed": 1,
        "--request-timeout": 60,
        "--report": "json",
        "--report-json-path": report,
    }
    arguments = [str(part) for pair in options.items() for part in pair]
    ran = subprocess.run([*command, *arguments, "--continue-on-failure", "--no-shrink"], stdout=sys.stderr)
    found = json.loads(report.read_text(encoding="utf-8"))
    expect((ran.returncode, found["failures"], found["errors"]), (0, [], []))
    told.saw(
        f"all checks but {', '.join(EXCLUDED)}",
        f"{found['test_cases']['generated']:,} calls of {found['operations']['tested']} operations, "
        "no failure",
    )
    told.end("schemathesis", "hypothesis")


if __name__ == "__main__":
    main()
