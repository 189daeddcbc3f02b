"""A page of sections, each of which is made by a part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap

_HEADING = "## "


def paragraph(*sentences: str) -> str:
    """Break sentences into lines of a page, however they are broken in the source."""
    words = " ".join(" ".join(sentences).split())
    return "\n".join(wrap(words, width=110, break_long_words=False, break_on_hyphens=False))


@dataclass(frozen=True)
class Page:
    """A page in Markdown.

    Attributes:
        introduction: text above the first section.
        sections: texts by title, in order.
    """

    introduction: str
    sections: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(cls, path: Path) -> Page:
        """Read a page from a file."""
        first, *rest = f"\n{path.read_text(encoding='utf-8')}".split(f"\n{_HEADING}")
        sections = tuple(
            (title.strip(), text.strip()) for title, _, text in (each.partition("\n") for each in rest)
        )
        return cls(first.strip(), sections)

    def with_section(self, title: str, text: str) -> Page:
        """Return the page with a section in place of that of the same title, or at the end."""
        known = {name for name, _ in self.sections}
        own = (title, text.strip())
        kept = tuple(own if name == title else (name, old) for name, old in self.sections)
        return replace(self, sections=kept if title in known else (*kept, own))

    def __str__(self) -> str:
        parts = [self.introduction, *(f"{_HEADING}{title}\n\n{text}" for title, text in self.sections)]
        return "\n\n".join(parts) + "\n"
