"""A visit of the page in a browser, and what a user sees and does there."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from tests.server.live import PATIENCE_S, Live

LOOK_MS = 20


class Visit:
    """The page of a server in a browser context of its own.

    Args:
        browser: of Playwright.
        server: visited.
        expects: parts of complaints of the browser that belong to the test.
        is_open: go there at once.
        options: of the context.

    Attributes:
        page: of Playwright.
        complaints: errors and warnings of the browser's console, and exceptions of scripts.
        hosts: that anything was asked of.
    """

    def __init__(
        self, browser: Any, server: Live, *, expects: Iterable[str] = (), is_open: bool = True, **options: Any
    ) -> None:
        self._server, self._expects, self._is_open = server, tuple(expects), is_open
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", self._told)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def _told(self, message: Any) -> None:
        # A page that outlives its server goes on asking how it is.
        is_over = self._server.has_been_told_to_end and "ERR_CONNECTION" in message.text
        if message.type in ("error", "warning") and not is_over:
            self.complaints.append(message.text)

    def __enter__(self) -> Visit:
        if self._is_open:
            self.open()
        return self

    def __exit__(self, *failure: object) -> None:
        self.page.goto("about:blank")
        self.context.close()
        if failure[0] is None:
            unexpected = [one for one in self.complaints if not any(part in one for part in self._expects)]
            assert not unexpected, f"expected no complaint of the browser, got {unexpected}"
            assert self.hosts == {f"127.0.0.1:{self._server.port}"}, f"expected one host, got {self.hosts}"

    def open(self) -> None:
        """Go to the page, and wait for its first look at the engine."""
        self.page.goto(self._server.url)
        self.until("document.querySelector('#figures div')")

    def by_id(self, name: str) -> Any:
        """Find an element."""
        return self.page.locator(f"#{name}")

    def text(self, name: str) -> str:
        """Read an element."""
        return str(self.by_id(name).inner_text())

    def until(self, expression: str) -> None:
        """Wait for something on the page."""
        # Playwright's own wait evaluates in the page, which the page's policy forbids.
        deadline = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"expected {expression}"
            self.page.wait_for_timeout(LOOK_MS)

    def answers(self) -> Any:
        """Every answer of the model."""
        return self.page.locator(".answered .text")

    def say(self, text: str) -> None:
        """Write a message and send it; the answer comes later."""
        self.by_id("prompt").fill(text)
        self.by_id("prompt").press("Enter")

    def ask(self, text: str) -> str:
        """Send a message, and wait for its answer, shown without white space at its beginning."""
        number = self.answers().count()
        self.say(text)
        self.until(f"document.querySelectorAll('.answered[aria-busy=false]').length > {number}")
        return str(self.answers().nth(number).text_content())

    def error(self) -> str:
        """Wait for a sentence that says what has failed."""
        return str(self.page.locator(".error").last.inner_text()).removesuffix("Try again").strip()

    def set(self, **values: str) -> None:
        """Change settings by the ids of their fields."""
        self.by_id("open-settings").click()
        for name, value in values.items():
            self.by_id(name.replace("_", "-")).fill(value)
        self.page.get_by_role("button", name="Save").click()

    def focus(self) -> str:
        """Name the element that has the focus."""
        return str(self.page.evaluate("document.activeElement.id || document.activeElement.textContent"))

    def answer_with(self, *events: dict[str, Any], is_whole: bool = True) -> None:
        """Let the network answer the next chats with these events."""
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"] * is_whole
        self.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=200, content_type="text/event-stream", body="".join(lines)),
        )


def chunk(text: str, **usage: Any) -> dict[str, Any]:
    """An event of a chat."""
    return {"choices": [{"index": 0, "delta": {"content": text}}], "usage": usage or None}
