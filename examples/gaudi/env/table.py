"""Print variables.md, the table of every variable, from variables.yaml."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

_HEAD = """\
# Variables

Every variable that a file of `examples/gaudi` sets. This page is made of `env/variables.yaml` by
`python env/table.py > variables.md`, and a test holds the files, the page and the defaults of `launch.sh`
against that list. Nothing of it has run on a card.

| variable | read by | default | meaning | source |
| --- | --- | --- | --- | --- |
"""


def table(path: Path) -> str:
    """The page as Markdown."""
    rows = []
    for one in yaml.safe_load(path.read_text(encoding="utf-8")):
        default = f"`{one['default']}`" if one.get("default") else ""
        source = one["source"]
        shown = "this project" if source == "here" else f"[{source.split('/')[2]}]({source})"
        rows.append(f"| `{one['name']}` | {one['reader']} | {default} | {one['meaning']} | {shown} |")
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table(Path(__file__).parent / "variables.yaml"))
