"""Priority and user of a call, on their way to the scheduling policy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from hpu_duo.request import Request
from hpu_duo.scheduling import POLICIES, PriorityFirst
from hpu_duo.scheduling.ranker import LinearRanker, Prompt, save_ranker
from tests.server.conftest import TinyChat
from tests.server.live import live

ASKED: dict[str, dict[str, object]] = {
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
    },
}


@pytest.mark.parametrize("route", ASKED)
def test_a_call_is_served_with_its_priority_and_user(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    seen: list[tuple[int, str | None]] = []

    class Watched(PriorityFirst):
        def queued(self, request: Request) -> None:
            seen.append((request.params.priority, request.params.user))
            super().queued(request)

    monkeypatch.setitem(POLICIES, "watched", Watched)
    with live(tiny.load(scheduling_policy="watched:patience=9")) as running:
        for extra in ({"priority": -4, "user": "ann"}, {"priority": 7}, {}):
            assert httpx.post(running.url + route, json={**ASKED[route], **extra}).status_code == 200
    assert seen == [(-4, "ann"), (7, None), (0, None)]


@pytest.mark.parametrize("route", ASKED)
def test_a_priority_is_refused_by_name_where_nobody_looks_at_it(tiny: TinyChat, route: str) -> None:
    with live(tiny.load()) as running:
        answer = httpx.post(running.url + route, json={**ASKED[route], "priority": 1, "user": "ann"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "priority"
        assert "scheduling_policy='priority'" in answer.json()["error"]["message"]
        assert httpx.post(running.url + route, json={**ASKED[route], "user": "ann"}).status_code == 200


@pytest.mark.parametrize("route", ASKED)
def test_prompts_are_scored_in_another_thread_than_the_engines(
    tiny: TinyChat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, route: str
) -> None:
    save_ranker(LinearRanker(1 << 8), tmp_path)
    threads: list[str] = []
    score = LinearRanker.score

    def watched(ranker: LinearRanker, prompts: Sequence[Prompt]) -> list[float]:
        threads.append(threading.current_thread().name)
        return score(ranker, prompts)

    monkeypatch.setattr(LinearRanker, "score", watched)
    with live(tiny.load(scheduling_policy="ltr", ranker=tmp_path)) as running:
        assert httpx.post(running.url + route, json=ASKED[route]).status_code == 200
    assert len(threads) == 1
    assert threads[0] != "hpu-duo-engine"
