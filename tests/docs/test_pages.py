"""Pages of the site: all are in its navigation, and links, anchors and named pages lead somewhere."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)")
NAMED = re.compile(r"(?<![\w./-])(?:docs|benchmarks/results|examples/gaudi)/[\w-]+\.md\b")
SOURCES = (".py", ".js", ".yaml", ".yml", ".env", ".sh", ".toml", ".md", ".service")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return frozenset(re.sub(r"[^\w -]", "", one).strip().lower().replace(" ", "-") for one in headings)


def dead_links(page: Path) -> Iterator[str]:
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            yield f"{page.relative_to(ROOT)}: {target}#{anchor}"


def in_navigation(entries: Any) -> Iterator[str]:
    """Paths of the pages below an entry of ``nav``."""
    match entries:
        case str():
            yield entries
        case dict():
            yield from in_navigation(list(entries.values()))
        case list():
            for one in entries:
                yield from in_navigation(one)


def test_no_link_and_no_anchor_is_dead() -> None:
    assert [link for page in PAGES for link in dead_links(page)] == []


def test_pages_that_text_and_code_name_exist() -> None:
    folders = ("hpu_duo", "graphs", "kernels_ref", "bias_builders", "benchmarks", "examples", "tests", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    theirs = "vllm-gaudi"
    dead = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*files, *PAGES]
        for line in path.read_text(encoding="utf-8").splitlines()
        for name in NAMED.findall(line)
        if not (ROOT / name).exists() and theirs not in line
    ]
    assert dead == []


def test_every_page_is_in_the_navigation_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = list(in_navigation(site["nav"]))
    own = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    guides = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples" / "gaudi").glob("*.md")}
    assert sorted(listed) == sorted(own | guides | {"index.md", "CONTRIBUTING.md", "CHANGELOG.md"})


def test_the_list_of_results_has_every_page_of_them() -> None:
    page = ROOT / "docs" / "results.md"
    listed = [posixpath.basename(link[0]) for link in LINK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(listed) == sorted(path.name for path in (ROOT / "benchmarks" / "results").glob("*.md"))


@pytest.mark.parametrize(("page", "most"), [("README.md", 900), ("docs/design.md", 2500)])
def test_pages_that_come_first_stay_short(page: str, most: int) -> None:
    """Words outside of code."""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    assert len(text.split()) <= most
