"""The engine on the page, and how the page looks: schemes, widths, accessibility, pictures for the docs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from tests.server.browser.conftest import Visits
from tests.server.browser.visit import Visit
from tests.server.conftest import TinyChat
from tests.server.live import Live, live, wait_until
from tests.server.test_pressure import raw_post, slowed
from tests.tiers import further

MOST_BYTES = 150_000
WIDE = {"width": 1080, "height": 680}
PASSKEYS = {"Joel": "loom actor camel", "Nina": "vase oats copper", "Basil": "garlic envelope anchor"}
SENTENCES = (
    "It was a quiet night. Behind the old barn stood a patient gate. ",
    "The baker slowly painted every fence. Nobody in the village noticed a letter. ",
    "One morning the doctor carried a lamp near the harbour. ",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """The built-in model with half of its heads streaming."""
    model = HPUDuoModel.from_pretrained(
        MODEL_DIR, pattern=str(PATTERN_DIR), sparsity=0.5, max_num_seqs=4, num_blocks=256, block_size=32
    )
    with live(model, model_names=("builtin",)) as running:
        yield running


def document() -> str:
    """A text with passkeys, and a question."""
    parts = [
        f"{sentence * 7}The passkey for {name} is {key}. Remember it. "
        for sentence, (name, key) in zip(SENTENCES, PASSKEYS.items(), strict=True)
    ]
    return "".join(parts) + "What is the passkey for Joel?"


def converse(seen: Visit) -> None:
    """Two questions about a document."""
    seen.set(temperature="0", max_tokens="4")
    assert PASSKEYS["Joel"] in seen.ask(document())
    seen.ask("What is the passkey for Basil?")


def violations(seen: Visit) -> list[str]:
    """Rules of axe-core that the page breaks, as it is now."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    # Colours are judged behind transitions.
    seen.until("document.getAnimations().every((one) => one.effect.getTiming().iterations === Infinity)")
    found = axe.Axe().run(seen.page).response["violations"]
    return [f"{one['id']}: {[node['html'] for node in one['nodes']]}" for one in found]


def test_the_engine_is_seen_at_work(tiny: TinyChat, visit: Visits, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(tiny.load(max_model_len=256)) as server:
        seen = visit(server)
        assert "No step yet." in seen.text("phases")
        slowed(server, 0.02, monkeypatch)
        seen.say("Once")
        rows = seen.page.get_by_role("meter", name="Rows")
        seen.until("document.querySelector('[role=meter][aria-label=Rows]').ariaValueText === '1 of 4'")
        assert rows.get_attribute("aria-valuenow") == "25"
        assert seen.page.get_by_role("meter", name="Blocks").get_attribute("aria-valuenow") != "0"
        seen.until("document.querySelectorAll('#phases th').length === 2")
        bars = "[...document.querySelectorAll('#activity rect')]"
        seen.until(f"{bars}.some((bar) => Number(bar.getAttribute('height')) > 0)")
        seen.page.keyboard.press("Escape")
        wait_until(server.holds_nothing)
        seen.until("document.querySelector('[role=meter][aria-label=Rows]').ariaValueText === '0 of 4'")
        stats = httpx.get(f"{server.url}/stats").json()
        table = seen.page.locator("#phases tr").all_inner_texts()
        assert [row.split("\t")[:2] for row in table] == [
            [phase, f"{number:,}"] for phase, number in sorted(stats["steps"].items())
        ]
        figures = dict(one.split("\n") for one in seen.page.locator("#figures > div").all_inner_texts())
        assert figures["Output tokens"] == f"{stats['num_output_tokens']:,}"
        assert figures["Padding"] == f"{100 * stats['num_padded_tokens'] / stats['num_query_tokens']:.1f} %"
        assert figures["Recompilations"] == f"{stats['num_recompilations']:,}"


def test_a_queue_and_a_warm_up_are_shown(server: Live, visit: Visits) -> None:
    stats = httpx.get(f"{server.url}/stats").json()
    busy = {"stage": "warming up", "warm_up": {"captured": 3, "total": 9}, "num_open": 7, "num_running": 4}
    seen = visit(server, is_open=False)
    seen.page.route("**/stats", lambda route: route.fulfill(json={**stats, **busy}))
    seen.open()
    assert seen.text("engine-state").startswith("Warming up, 3 of 9 shapes captured. ")
    assert seen.text("stage") == "warming up"
    assert seen.page.get_by_role("meter", name="Queue").get_attribute("aria-valuetext") == "3 of 2,048"


def test_a_hidden_engine_leaves_the_room_to_the_chat(server: Live, visit: Visits) -> None:
    seen = visit(server)
    toggle = seen.by_id("toggle-engine")
    width = seen.by_id("transcript").bounding_box()["width"]
    assert toggle.get_attribute("aria-expanded") == "true"
    toggle.click()
    assert seen.by_id("engine").is_hidden()
    assert toggle.get_attribute("aria-expanded") == "false"
    assert seen.by_id("transcript").bounding_box()["width"] > width


@pytest.mark.parametrize("width", [320, 390])
def test_a_narrow_screen_shows_all_without_scrolling_aside(server: Live, visit: Visits, width: int) -> None:
    seen = visit(server, viewport={"width": width, "height": 640})
    assert seen.by_id("engine").is_hidden()
    converse(seen)
    for name in ("toggle-engine", "open-settings"):
        seen.by_id(name).click()
        assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert seen.page.evaluate("transcript.scrollWidth <= transcript.clientWidth")
    seen.page.keyboard.press("Escape")
    box = seen.by_id("send").bounding_box()
    assert box["x"] + box["width"] <= width
    assert box["y"] + box["height"] <= 640


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_scheme_of_the_system(server: Live, visit: Visits, scheme: str) -> None:
    seen = visit(server, color_scheme=scheme)
    colour = seen.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    light = sum(int(part) for part in colour.strip("rgb()").split(",")) / (3 * 255)
    assert light > 0.9 if scheme == "light" else light < 0.15


def test_nothing_moves_for_who_wants_that(
    tiny: TinyChat, visit: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tiny.load(max_model_len=256)) as server:
        seen = visit(server, reduced_motion="reduce")
        slowed(server, 0.02, monkeypatch)
        seen.say("Once")
        seen.until("document.querySelector('[aria-busy=true]')")
        assert seen.page.evaluate("document.getAnimations().length") == 0
        seen.page.keyboard.press("Escape")


@pytest.mark.parametrize(("scheme", "width"), [*further(("light", 1280)), ("dark", 1280), ("light", 390)])
def test_axe_finds_nothing_in_any_state(server: Live, visit: Visits, scheme: str, width: int) -> None:
    seen = visit(
        server, color_scheme=scheme, viewport={"width": width, "height": 800}, expects=["a status of 400"]
    )
    assert violations(seen) == []
    converse(seen)
    seen.say("long " * 9000)
    assert "too long" in seen.error()
    if width < 1000:
        seen.by_id("toggle-engine").click()
    assert violations(seen) == []
    seen.by_id("open-settings").click()
    assert violations(seen) == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *further(
            ("page-light", {"viewport": WIDE}),
            ("page-dark", {"viewport": WIDE, "color_scheme": "dark"}),
            ("page-narrow", {"viewport": {"width": 390, "height": 760}}),
        ),
    ],
)
def test_pictures_for_the_docs_are_small(
    server: Live,
    visit: Visits,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    name: str,
    options: dict[str, Any],
) -> None:
    seen = visit(server, **options)
    # Others use the engine as well.
    others = {"prompt": document(), "n": 3, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with raw_post(server, others):
        wait_until(lambda: server.model.stats().num_running == 3)
        converse(seen)
        bars = "[...document.querySelectorAll('#activity rect')]"
        seen.until(f"{bars}.filter((bar) => Number(bar.getAttribute('height')) > 0).length > 2")
        seen.page.screenshot(path=tmp_path / f"{name}.png", animations="disabled")
    file = tmp_path / f"{name}.png"
    assert 5_000 < file.stat().st_size < MOST_BYTES
    if (kept := request.config.getoption("--screenshots", None)) is not None:
        kept.mkdir(parents=True, exist_ok=True)
        (kept / file.name).write_bytes(file.read_bytes())
