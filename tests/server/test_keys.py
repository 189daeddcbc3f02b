"""API keys: who may call, and who may read metrics and statistics."""

from __future__ import annotations

import pytest

from tests.server.conftest import TinyChat
from tests.server.live import KEY, live

ASKED = {"model": "tiny", "prompt": "hi", "max_tokens": 1}


def test_calls_need_one_of_the_keys(tiny: TinyChat) -> None:
    with live(tiny.load(), api_keys=("another", KEY)) as server:
        assert server.client().completions.create(model="tiny", prompt="hi", max_tokens=1).choices
        assert server.client(api_key="another").models.list().data
        for key in ("wrong", KEY + "x", KEY[:-1], "another, " + KEY):
            with server.http(headers={"Authorization": f"Bearer {key}"}) as http:
                for path in ("/v1/models", "/tokenize", "/v1/nothing", "/openapi.json"):
                    assert http.get(path).status_code == 401, (key, path)
                assert http.post("/v1/completions", json=ASKED).json()["error"]["code"] == "invalid_api_key"
        with server.http() as http:
            assert http.get("/v1/models").status_code == 401
            assert http.get("/v1/models", headers={"Authorization": f"Basic {KEY}"}).status_code == 401
            for path in ("/live", "/health", "/ready", "/metrics", "/version"):
                assert http.get(path).status_code == http.get(f"{path}/").status_code == 200


@pytest.mark.parametrize("api_keys", [(), (KEY,)])
def test_metrics_and_statistics_may_need_keys_of_their_own(tiny: TinyChat, api_keys: tuple[str, ...]) -> None:
    with live(tiny.load(), api_keys=api_keys, metrics_api_keys=("scrape",)) as server, server.http() as http:
        for path in ("/metrics", "/stats"):
            for key, status in (("scrape", 200), (KEY, 401), ("x", 401)):
                for asked in (path, f"{path}/"):
                    headers = {"Authorization": f"Bearer {key}"}
                    assert http.get(asked, headers=headers).status_code == status
        assert http.get("/health").status_code == 200
        scraper = {"Authorization": "Bearer scrape"}
        for headers in ({}, scraper):
            assert http.get("/v1/models", headers=headers).status_code == (401 if api_keys else 200)
