"""Drafts over HTTP: predicted outputs, their usage, what requests may choose, and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hpu_duo.server.running.admission import Timing
from tests.server.conftest import TinyChat
from tests.server.live import Live, live

CHAT = {"messages": [{"role": "user", "content": "tell me"}], "seed": 4, "max_tokens": 24, "ignore_eos": True}


class Watch:
    """Notes latencies."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def first_token(self, seconds: float) -> None:
        pass

    def next_token(self, seconds: float) -> None:
        self.found.append(seconds)


def test_latencies_between_tokens_are_those_between_steps() -> None:
    watch = Watch()
    timing = Timing(watch)
    for choice, at in ((0, 1.0), (1, 1.0), (0, 2.0), (0, 2.0), (1, 2.0), (0, 3.5)):
        timing.came(choice, at)
    assert watch.found == [1.0, 1.0, 1.5]


@pytest.fixture(scope="module")
def drafting(tiny: TinyChat) -> Iterator[Live]:
    """A server that drafts from predictions, and from nothing else: its n-grams are too long."""
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 31}
    with live(tiny.load(max_num_batched_tokens=24, speculative_config=config)) as running:
        yield running


def answer(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def test_a_prediction_changes_usage_and_nothing_else(drafting: Live) -> None:
    with drafting.http() as http:
        plain = answer(http)
        text = plain["choices"][0]["message"]["content"]
        assert "completion_tokens_details" not in plain["usage"]
        parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
        for content in (text, parts, "zz" + text):
            found = answer(http, prediction={"type": "content", "content": content})
            assert found["choices"] == plain["choices"]
            details = found["usage"].pop("completion_tokens_details")
            assert found["usage"]["completion_tokens"] == 24
            assert 0 < details["accepted_prediction_tokens"] <= 24
            assert details["rejected_prediction_tokens"] >= 0
        none = answer(http, prediction={"type": "content", "content": text}, vllm_xargs={"speculate": False})
        assert none["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
        assert none["choices"] == plain["choices"]
        metrics = http.get("/metrics").text
        told = http.get("/stats").json()["speculation"]
        view = http.get("/page/engine.js").text
    # What the page shows of them.
    assert 0 < told["num_drafts"] <= told["num_draft_tokens"]
    assert told["num_accepted_tokens"] > 0
    assert all(f"{name}: " in view for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"))
    assert (
        'spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="0"}' in metrics
    )


def test_a_prediction_of_anything_but_text_is_refused(drafting: Live) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    for part in (image, {"type": "text"}):
        prediction = {"type": "content", "content": [{"type": "text", "text": "so"}, part]}
        with drafting.http() as http:
            response = http.post("/v1/chat/completions", json={**CHAT, "prediction": prediction})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prediction")
        assert f"expected parts of type 'text' with a text, got {part['type']!r} without" in response.text


def test_a_stream_has_all_tokens_and_the_usage(drafting: Live) -> None:
    with drafting.http() as http:
        text = answer(http)["choices"][0]["message"]["content"]
    client = drafting.client()
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=CHAT["messages"],  # type: ignore[arg-type]
            seed=4,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            prediction={"type": "content", "content": text},
            extra_body={"ignore_eos": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert len(chunks) < 24, "tokens of one step are one event"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 24
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens


def test_a_server_without_drafts_takes_a_prediction_for_no_more_than_that(server: Live) -> None:
    with server.http() as http:
        found = answer(http, prediction={"type": "content", "content": "so it was"})
    details = found["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
