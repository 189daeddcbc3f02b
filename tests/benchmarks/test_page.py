"""Pages of sections."""

from __future__ import annotations

from pathlib import Path

from benchmarks.server_faults.page import Page, paragraph


def test_a_section_takes_the_place_of_that_of_its_title_and_leaves_the_others(tmp_path: Path) -> None:
    page = Page("# Title").with_section("One", "1\n\n| a |").with_section("Two", "2")
    path = tmp_path / "page.md"
    path.write_text(str(page))
    assert Page.read(path) == page
    changed = Page.read(path).with_section("One", "new")
    assert [title for title, _ in changed.sections] == ["One", "Two"]
    assert dict(changed.sections) == {"One": "new", "Two": "2"}
    assert str(changed).startswith("# Title\n")


def test_lines_of_a_paragraph_are_those_of_the_page() -> None:
    assert paragraph("\n    one\n    two\n", "three") == "one two three"
