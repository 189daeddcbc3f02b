"""Command line of the parts: see the package."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks.first_contact.page import Page

PARTS = ("heads", "padding", "recording", "selftest", "lowering")


def main() -> None:
    """Run parts, and print their sections or write them into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all")
    parser.add_argument("--page", type=Path, help="Markdown page to write the sections into")
    options = parser.parse_args()
    page = Page.read(options.page) if options.page is not None and options.page.exists() else Page()
    for name in options.parts or PARTS:
        part = importlib.import_module(f"benchmarks.first_contact.{name}")
        section = "\n".join(part.report())
        page = page.with_section(part.TITLE, section)
        print(f"## {part.TITLE}\n\n{section}\n", flush=True)
        if options.page is not None:
            options.page.write_text(str(page), encoding="utf-8")


if __name__ == "__main__":
    main()
