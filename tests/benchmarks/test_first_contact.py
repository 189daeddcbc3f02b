"""Parts of the benchmark of a first contact, on small figures."""

from __future__ import annotations

from pathlib import Path

from benchmarks.first_contact.page import Page, paragraph
from benchmarks.first_contact.traffic import TRAFFICS
from graphs import StepLimits

LIMITS = StepLimits(
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_model_len=4096,
    block_size=64,
    num_blocks=300,
    decode_len=1,
    max_chunk_rows=1,
)


def test_a_section_takes_the_place_of_that_of_its_title_and_leaves_the_others(tmp_path: Path) -> None:
    page = Page().with_section("One", "1\n\n| a |").with_section("Two", "2")
    path = tmp_path / "page.md"
    path.write_text(str(page))
    assert Page.read(path) == page
    changed = Page.read(path).with_section("One", "new")
    assert [title for title, _ in changed.sections] == ["One", "Two"]
    assert dict(changed.sections) == {"One": "new", "Two": "2"}
    assert str(changed).startswith("# First contact with a Gaudi\n")


def test_lines_of_a_paragraph_are_those_of_the_page() -> None:
    assert paragraph("\n    one\n    two\n", "three") == "one two three"


def test_a_traffic_is_the_same_for_a_seed_and_within_limits() -> None:
    for traffic in TRAFFICS:
        steps = traffic.steps(LIMITS, 200, 1)
        assert steps == traffic.steps(LIMITS, 200, 1) != traffic.steps(LIMITS, 200, 2)
        assert 0 < sum(steps.values()) <= 200
        assert all(map(LIMITS.reaches, steps))
