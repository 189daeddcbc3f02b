"""A chat on the page, in a real browser, against a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.browser.conftest import Visits
from tests.server.browser.visit import chunk
from tests.server.conftest import TinyChat
from tests.server.live import Live, live, wait_until
from tests.server.test_pressure import slowed

HOSTILE = (
    "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
    "</div><b>not bold</b> &amp; [link](javascript:alert(1)) \u202e\x07 ${1+1} {{7*7}}"
)


@pytest.fixture(scope="module")
def server(tiny: TinyChat) -> Iterator[Live]:
    with live(tiny.load(max_model_len=256)) as running:
        yield running


def usage_of(server: Live, *said: str, **fields: Any) -> tuple[int, int, str]:
    """Tokens of prompt and answer, and the answer as it is shown, as another client gets them."""
    roles = ("user", "assistant")
    messages: list[Any] = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    done = server.client().chat.completions.create(model="tiny", messages=messages, temperature=0, **fields)
    assert done.usage is not None
    content = (done.choices[0].message.content or "").lstrip()
    return done.usage.prompt_tokens, done.usage.completion_tokens, content


def test_it_opens_with_the_model_and_the_field_for_a_message(server: Live, visit: Visits) -> None:
    seen = visit(server)
    assert (seen.text("model"), seen.text("stage")) == ("tiny", "ready")
    assert seen.focus() == "prompt"
    assert seen.text("sparsity") == "0 of 4 (0 %)"
    assert seen.by_id("needs-key").is_hidden()
    assert seen.by_id("no-template").is_hidden()


def test_an_answer_streams_and_its_counters_move(
    tiny: TinyChat, visit: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tiny.load(max_model_len=256)) as server:
        expected = usage_of(server, "Once", max_tokens=41)
        seen = visit(server)
        seen.set(temperature="0", max_tokens="41")
        slowed(server, 0.03, monkeypatch)
        seen.say("Once")
        seen.until("Number(document.getElementById('completion-tokens').textContent) > 2")
        part, busy = seen.answers().text_content(), seen.page.locator("[aria-busy=true]").count()
        seen.until("document.querySelector('.answered[aria-busy=false]')")
        whole = seen.answers().text_content()
        assert busy == 1
        assert 0 < len(part) < len(whole)
        assert whole.startswith(part)
        assert (int(seen.text("prompt-tokens")), int(seen.text("completion-tokens")), whole) == expected
        assert 0 < float(seen.text("rate")) < 1 / 0.03
        facts = seen.page.locator(".facts").inner_text()
        assert re.fullmatch(
            r"41 tokens · [\d.]+ tokens/s · first after [\d.]+ m?s · cut at the token limit", facts
        )
        assert seen.text("status") == "Answer complete, 41 tokens."
        memory, tokens = server.service.memory, sum(expected[:2])
        full, held = memory.full_attention_bytes(tokens), memory.bytes_per_request(tokens)
        assert seen.text("kv-full") == f"{full / 1024:.1f} KiB"
        # Of a short text no share: its blocks and ring are mostly empty.
        share = f" ({100 * held / full:.0f} %)" if held <= 1.1 * full else ""
        assert seen.text("kv-held") == f"{held / 1024:.1f} KiB{share}"


def test_the_model_is_told_of_the_conversation_and_the_system_prompt(server: Live, visit: Visits) -> None:
    seen = visit(server)
    seen.set(temperature="0", max_tokens="6")
    first = seen.ask("Once")
    second = seen.ask("more")
    expected = usage_of(server, "Once", first, "more", max_tokens=6)
    assert (int(seen.text("prompt-tokens")), int(seen.text("completion-tokens")), second) == expected
    seen.set(system="be")
    seen.ask("again")
    # "s:be;" before, and the turn between.
    assert int(seen.text("prompt-tokens")) == expected[0] + 5 + len(second) + len(";u:again;a:")


@pytest.mark.parametrize("way", ["key", "button"])
def test_stopping_keeps_what_has_come_and_frees_the_engine(
    tiny: TinyChat, visit: Visits, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    with live(tiny.load(max_model_len=256)) as server:
        slowed(server, 0.03, monkeypatch)
        seen = visit(server)
        seen.set(temperature="0")
        seen.say("Once")
        seen.until("document.querySelector('.answered .text').textContent.length > 3")
        if way == "key":
            seen.page.keyboard.press("Escape")
        else:
            seen.by_id("stop").click()
        wait_until(server.holds_nothing)
        seen.until("document.querySelector('.answered[aria-busy=false]')")
        kept = seen.answers().text_content()
        assert 3 < len(kept) < 200
        assert seen.page.locator(".facts").inner_text().endswith("stopped")
        assert seen.focus() == "prompt"
        assert seen.by_id("send").is_visible()
        wait_until(lambda: server.service.metrics.num_ended["abort"] == 1)
        seen.set(max_tokens="2")
        seen.ask("on")
        assert int(seen.text("prompt-tokens")) == len(f"u:Once;a:{kept};u:on;a:")


def test_a_new_chat_ends_the_old_one(tiny: TinyChat, visit: Visits, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(tiny.load(max_model_len=256)) as server:
        slowed(server, 0.03, monkeypatch)
        seen = visit(server)
        seen.say("Once")
        seen.until("document.querySelector('.answered .text').textContent.length > 1")
        seen.by_id("new-chat").click()
        wait_until(server.holds_nothing)
        assert seen.page.locator(".message").count() == 0
        assert seen.by_id("welcome").is_visible()
        assert (seen.text("completion-tokens"), seen.focus()) == ("–", "prompt")
        seen.set(max_tokens="3")
        seen.ask("a")
        assert int(seen.text("prompt-tokens")) == len("u:a;a:")


def test_tokens_that_came_from_the_cache_are_shown_where_a_server_counts_them(
    server: Live, visit: Visits
) -> None:
    seen = visit(server)
    seen.ask("a")
    assert seen.by_id("cached").is_hidden()
    counts = {"prompt_tokens": 1500, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1280}}
    seen.answer_with(chunk("b", **counts))
    assert seen.ask("a") == "b"
    assert (seen.text("prompt-tokens"), seen.text("cached-tokens")) == ("1,500", "1,280")


def test_whatever_is_written_stays_text(server: Live, visit: Visits) -> None:
    seen = visit(server)
    seen.answer_with(chunk(HOSTILE[:30]), chunk(HOSTILE[30:]))
    assert seen.ask(HOSTILE) == HOSTILE
    assert seen.page.locator(".asked .text").text_content() == HOSTILE
    assert seen.page.locator(".message :is(img, script, b, a)").count() == 0
    assert seen.page.title() == "HPU-Duo"


def test_no_script_can_make_markup_of_a_text(server: Live, visit: Visits) -> None:
    seen = visit(server, expects=["TrustedHTML", "Trusted Type"])
    tried = (
        "() => { try { document.body.innerHTML = '<p>'; return 'done' } catch (error) { return error.name } }"
    )
    assert seen.page.evaluate(tried) == "TypeError"


def test_a_long_message_is_folded_and_a_long_word_is_broken(server: Live, visit: Visits) -> None:
    seen = visit(server)
    seen.answer_with(chunk("w" * 5000))
    seen.ask("line\n" * 60)
    fold = seen.page.get_by_role("button", name="Show all")
    height = seen.page.locator(".asked").bounding_box()["height"]
    fold.click()
    assert seen.page.locator(".asked").bounding_box()["height"] > 3 * height
    assert seen.page.get_by_role("button", name="Show less").get_attribute("aria-expanded") == "true"
    assert seen.page.evaluate("document.getElementById('transcript').scrollWidth <= innerWidth")


def test_a_reader_further_up_is_left_there(
    tiny: TinyChat, visit: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tiny.load(max_model_len=256)) as server:
        seen = visit(server)
        seen.set(temperature="0", max_tokens="60")
        seen.ask("line\n" * 9)
        slowed(server, 0.02, monkeypatch)
        seen.page.set_viewport_size({"width": 1280, "height": 420})
        seen.say("Once")
        seen.until("document.querySelector('.answered:last-child .text').textContent.length > 10")
        assert seen.page.evaluate("transcript.scrollTop") > 0
        seen.page.evaluate("transcript.scrollTop = 0")
        length = seen.answers().last.text_content()
        seen.until(
            f"document.querySelector('.answered:last-child .text').textContent.length > {len(length) + 5}"
        )
        assert seen.page.evaluate("transcript.scrollTop") == 0


def test_a_model_without_a_chat_template_continues_the_text(tiny: TinyChat, visit: Visits) -> None:
    with live(tiny.tiny.load(max_model_len=256)) as server:
        seen = visit(server)
        assert seen.by_id("no-template").is_visible()
        seen.set(temperature="0", max_tokens="8")
        client, asked = server.client(), {"model": "tiny", "temperature": 0, "max_tokens": 8}
        first = seen.ask("Once")
        assert first == client.completions.create(prompt="Once", **asked).choices[0].text.lstrip()
        second = seen.ask("more")
        expected = client.completions.create(prompt=f"Once{first}\nmore", **asked)
        assert second == expected.choices[0].text.lstrip()
        seen.by_id("open-settings").click()
        assert seen.by_id("system").is_hidden()


def test_all_is_done_by_keyboard(server: Live, visit: Visits) -> None:
    seen = visit(server)
    keys = seen.page.keyboard
    keys.type("one")
    keys.press("Shift+Enter")
    keys.type("two")
    assert seen.by_id("prompt").input_value() == "one\ntwo"
    # Enter that ends the composition of a character sends nothing.
    seen.by_id("prompt").dispatch_event("keydown", {"key": "Enter", "isComposing": True, "bubbles": True})
    assert seen.page.locator(".asked").count() == 0
    keys.press("Enter")
    seen.until("document.querySelector('.answered[aria-busy=false]')")
    assert seen.page.locator(".asked .text").text_content() == "one\ntwo"
    assert seen.by_id("prompt").input_value() == ""
    order = []
    for _ in range(8):
        keys.press("Tab")
        order.append(seen.focus())
    beginning = order.index("new-chat") if "new-chat" in order else 0
    assert order[:2] == ["send", "engine"]
    assert order[beginning : beginning + 4] == ["new-chat", "open-settings", "toggle-engine", "transcript"]
    seen.by_id("open-settings").focus()
    keys.press("Enter")
    assert seen.focus() == "system"
    keys.press("Tab")
    keys.type("0.5")
    keys.press("Enter")
    assert seen.by_id("settings").is_hidden()
    assert seen.focus() == "open-settings"
    keys.press("Enter")
    assert seen.by_id("temperature").input_value() == "0.5"
    keys.press("Escape")
    assert seen.by_id("settings").is_hidden()


def test_an_empty_message_is_not_sent_and_a_bad_setting_is_not_saved(server: Live, visit: Visits) -> None:
    seen = visit(server)
    seen.say("  \n ")
    assert seen.page.locator(".message").count() == 0
    seen.set(temperature="7")
    assert seen.by_id("settings").is_visible()
    assert seen.by_id("temperature").evaluate("field => field.validity.rangeOverflow")
    seen.page.get_by_role("button", name="Cancel").click()
    seen.by_id("open-settings").click()
    assert seen.by_id("temperature").input_value() == ""


def test_an_answer_that_comes_at_once_has_no_speed(server: Live, visit: Visits) -> None:
    seen = visit(server)
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    seen.answer_with(*(chunk(f" {word}") for word in "abc"), chunk(" d", **usage))
    seen.say("Once")
    seen.until("document.querySelector('.answered[aria-busy=false]')")
    assert seen.text("rate") == "–"
    assert "tokens/s" not in seen.page.locator(".facts").inner_text()
