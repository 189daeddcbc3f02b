"""Failures are told in a sentence, and can be tried again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hpu_duo.server.running.admission import Stage
from tests.server.browser.conftest import Visits
from tests.server.browser.visit import chunk
from tests.server.conftest import TinyChat
from tests.server.live import KEY, Live, live, wait_until
from tests.server.test_pressure import LONG, raw_post, slowed

STATUS = "Failed to load resource: the server responded with a status of"


@pytest.fixture(scope="module")
def server(tiny: TinyChat) -> Iterator[Live]:
    with live(tiny.load()) as running:
        yield running


def test_a_key_is_asked_for_and_kept_in_the_tab_only(tiny: TinyChat, visit: Visits) -> None:
    with live(tiny.load(), api_keys=(KEY,)) as server:
        seen = visit(server, expects=[f"{STATUS} 401"])
        assert seen.by_id("needs-key").is_visible()
        seen.say("Once")
        assert seen.error() == "The server asks for an API key that it knows. Enter one in the settings."
        assert seen.focus() == "api-key"
        assert seen.by_id("api-key").get_attribute("type") == "password"
        seen.page.keyboard.type(f" {KEY} ")
        seen.page.keyboard.press("Enter")
        seen.page.get_by_role("button", name="Try again").click()
        seen.until("document.querySelector('.facts').textContent")
        assert seen.page.locator(".error").count() == 0
        assert seen.page.locator(".asked").count() == 1
        assert KEY in seen.page.evaluate("JSON.stringify(sessionStorage)")
        assert seen.page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert KEY not in seen.page.url
        seen.page.reload()
        assert seen.ask("again")
        other = seen.context.new_page()
        other.goto(server.url)
        other.locator("#figures div").first.wait_for()
        assert other.evaluate("sessionStorage.length") == 0
        assert other.locator("#needs-key").is_visible()


def test_a_full_queue_says_when_to_come_again(
    tiny: TinyChat, visit: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tiny.load(max_num_seqs=1), max_queue=0) as server:
        seen = visit(server, expects=[f"{STATUS} 429"])
        slowed(server, 0.05, monkeypatch)
        other = raw_post(server, {**LONG, "stream": True})
        wait_until(lambda: server.model.stats().num_running == 1)
        seen.say("Once")
        assert seen.error() == "The server is busy, its queue is full. Try again in 1 second."
        assert seen.page.locator("[role=log][aria-live=polite] .error").count() == 1
        assert seen.text("status") == ""
        seen.set(max_tokens="2")
        other.close()
        wait_until(server.holds_nothing)
        seen.page.get_by_role("button", name="Try again").click()
        seen.until("document.querySelector('.facts').textContent")


@pytest.mark.parametrize("stage", [Stage.DRAINING, Stage.WARMING_UP])
def test_a_server_that_is_not_ready_says_so(tiny: TinyChat, visit: Visits, stage: Stage) -> None:
    with live(tiny.load()) as server:
        seen = visit(server, expects=[f"{STATUS} 503"])
        server.service.admission.stage = stage
        seen.say("Once")
        seconds = {Stage.DRAINING: "1 second", Stage.WARMING_UP: "5 seconds"}[stage]
        assert seen.error() == (
            f"The server does not take calls now: the server is {stage.value}. Try again in {seconds}."
        )
        seen.until(f"document.getElementById('stage').textContent === '{stage.value}'")
        server.service.admission.stage = Stage.READY
        assert seen.ask("Once")


def test_a_conversation_that_is_too_long_is_named(server: Live, visit: Visits) -> None:
    seen = visit(server, expects=[f"{STATUS} 400"])
    seen.say("long " * 100)
    assert seen.error().startswith("The conversation is too long for the model: ")


def test_a_server_that_cannot_be_reached_is_told_and_found_again(server: Live, visit: Visits) -> None:
    seen = visit(server, expects=["ERR_INTERNET_DISCONNECTED"])
    seen.context.set_offline(True)
    seen.say("Once")
    assert seen.error() == "The server cannot be reached. It may have stopped, or the network is down."
    seen.until("document.getElementById('stage').textContent === 'no connection'")
    assert seen.text("engine-state") == "The server does not answer; these are the last figures."
    seen.context.set_offline(False)
    seen.until("document.getElementById('stage').textContent === 'ready'")
    seen.page.get_by_role("button", name="Try again").click()
    seen.until("document.querySelector('.facts').textContent")


def test_an_answer_without_an_end_is_not_taken_for_whole(server: Live, visit: Visits) -> None:
    seen = visit(server)
    seen.answer_with(chunk("half an ans"), is_whole=False)
    seen.say("Once")
    assert seen.error() == "The connection to the server was lost in the middle of the answer."
    assert seen.answers().text_content() == "half an ans"


def test_an_answer_that_breaks_off_says_why(
    tiny: TinyChat, visit: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tiny.load()) as server:
        seen = visit(server)
        runner = server.model.engine.runner
        launch = runner.launch

        def failing(plan: Any, *args: Any) -> Any:
            if any(row.request.num_tokens > 20 for row in plan.rows):
                raise RuntimeError("the device does not like it")
            return launch(plan, *args)

        slowed(server, 0.02, monkeypatch)
        monkeypatch.setattr(runner, "launch", failing)
        seen.say("Once")
        assert seen.error().startswith("The answer broke off: ")
        assert "the device does not like it" in seen.error()
        assert len(seen.answers().text_content()) > 0


def test_events_may_be_cut_and_ended_in_every_way(server: Live, visit: Visits) -> None:
    seen = visit(server)
    body = ": a comment\r\n\r\ndata: 1\n\ndata:2\r\rid: 7\nevent: x\n\n"
    body += "data\n\ndata: 3\r\ndata: ü4\r\n\r\ndata: lost"
    script = """async ([body, size]) => {
        const { eventData } = await import("/page/sse.js");
        const bytes = new TextEncoder().encode(body);
        const stream = new ReadableStream({
            start(controller) {
                for (let at = 0; at < bytes.length; at += size)
                    controller.enqueue(bytes.slice(at, at + size));
                controller.close();
            },
        });
        const found = [];
        for await (const data of eventData(stream)) found.push(data);
        return found;
    }"""
    for size in (1, 2, 3, 1000):
        assert seen.page.evaluate(script, [body, size]) == ["1", "2", "", "3\nü4"]
