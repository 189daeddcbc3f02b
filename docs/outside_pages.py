"""Hook of mkdocs: pages outside of ``docs/`` become pages of the site, with the links between all of them.

Links in the sources lead from file to file, so that they work in a checkout and on a forge too. The README is
the front page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks/results", "examples/gaudi")
FILES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Single pages, with their paths in the site."""
SHOWN = {".md", ".png", ".svg"}
"""Suffixes of what the site has of these folders."""
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[(?P<label>[^\]]*)\]\((?!https?:|#|/)(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def in_site(path: str) -> str:
    """The path in the site of a file of the repository."""
    return FILES.get(path, path.removeprefix("docs/"))


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages and images from outside."""
    found = [ROOT / name for name in FILES]
    for folder in FOLDERS:
        found += [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SHOWN]
    for path in found:
        uri = in_site(path.relative_to(ROOT).as_posix())
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links between files of the repository into links between pages; other files are named only.

    What belongs to a point of a numbered list is indented by four spaces, which Python's Markdown expects.
    """
    source = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()
    base = posixpath.dirname(in_site(source))

    def led(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))
        uri = in_site(target)
        if (ROOT / target).exists() and files.get_file_from_path(uri) is None:
            return f"{link['label']} (`{target}`)"
        return f"[{link['label']}]({posixpath.relpath(uri, base or '.')}{link['anchor'] or ''})"

    parts = FENCE.split(LINK.sub(led, markdown))
    parts[::2] = [re.sub(r"^   (?=\S)", "    ", part, flags=re.MULTILINE) for part in parts[::2]]
    return "".join(parts)
