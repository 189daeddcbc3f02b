"""A real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.server.browser.visit import Visit
from tests.server.live import Live

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

Visits = Callable[..., Visit]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known where this directory is named on the command line."""
    parser.addoption(
        "--screenshots", type=Path, metavar="DIR", help="Keep the screenshots there, as docs/images."
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is below, so that -m 'not browser' leaves it out."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.browser)


# Playwright keeps an event loop in the thread that started it, where tests of other modules could start none.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs the package playwright, of the extra dev"
    )
    if CHROMIUM is None:
        pytest.skip("needs Chromium on the path; on Debian: apt install chromium")
    with playwright.sync_playwright() as driver:
        # Chromium's sandbox needs what containers and root do not have; it only meets this server here.
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Visits]:
    """Visits of servers; what the browser complains of and is not expected fails the test."""
    with ExitStack() as stack:

        def begin(server: Live, **options: Any) -> Visit:
            return stack.enter_context(Visit(chromium, server, **options))

        yield begin
