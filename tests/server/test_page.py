"""The page's files, as they are served; tests/server/browser looks at the page itself."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.server.conftest import TinyChat
from tests.server.live import KEY, Live, live, wait_until

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "hpu_duo/server/page").iterdir())
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


def test_the_page_and_all_it_needs_is_served(server: Live) -> None:
    with server.http() as http:
        index = http.get("/")
        assert index.headers["content-type"] == "text/html; charset=utf-8"
        needed = set(re.findall(r'(?:href|src)="(page/[^"]+)"', index.text))
        seen: set[str] = set()
        while fresh := needed - seen:
            for path in fresh:
                answer = http.get(f"/{path}")
                assert answer.status_code == 200, path
                needed |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', answer.text)}
            seen |= fresh
        assert seen == {f"page/{file.name}" for file in FILES if file.name != "index.html"}
        assert http.head("/").status_code == 200
        assert http.get("/page/nothing.js").json()["error"]["code"] == "not_found"
        assert http.get("/page/..%2f..%2fconfig.py").status_code == 404


def test_no_foreign_host_and_no_inline_script_is_allowed(server: Live) -> None:
    with server.http() as http:
        for path in ("/", "/page/main.js"):
            headers = http.get(path).headers
            policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
            assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
            assert policy["require-trusted-types-for"] == "'script'"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_name_no_foreign_host_and_need_no_exception_of_the_policy(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"'\s]+", text)) <= {SVG_NAMESPACE}
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\son\w+=|style=", text
    )


def test_files_that_a_browser_has_are_not_sent_again(server: Live) -> None:
    with server.http() as http:
        first = http.get("/page/main.js")
        again = http.get("/page/main.js", headers={"If-None-Match": f'"other", W/{first.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
        assert http.get("/page/main.js", headers={"If-None-Match": '"other"'}).status_code == 200


def test_the_page_needs_no_key_and_calls_do(tiny: TinyChat) -> None:
    with live(tiny.load(), api_keys=(KEY,)) as server, server.http() as http:
        assert [http.get(path).status_code for path in ("/", "/page/main.js", "/stats")] == [200] * 3
        assert [http.get(path).status_code for path in ("/v1/models", "/pages", "/page")] == [401] * 3
        assert http.get("/stats").json()["asks_for_key"] is True


def test_a_server_without_a_page_has_nothing_there(tiny: TinyChat) -> None:
    with live(tiny.load(), has_page=False) as server, server.http() as http:
        assert http.get("/").status_code == http.get("/page/main.js").status_code == 404
        assert http.get("/stats").status_code == 200


def test_statistics_tell_what_the_page_shows(tiny: TinyChat) -> None:
    with live(tiny.tiny.load(), max_queue=5) as server, server.http() as http:
        stats = http.get("/stats").json()
        assert (stats["model"], stats["has_chat_template"], stats["asks_for_key"]) == ("tiny", False, False)
        assert (stats["max_open"], stats["warm_up"], stats["num_recompilations"]) == (9, None, 0)
        kv, memory = stats["kv"], server.model.engine.runner.store.plan
        for tokens in (1, 8, 9, 50):
            blocks = -(-tokens // kv["block_size"])
            assert blocks * kv["block_bytes"] + kv["row_bytes"] == memory.bytes_per_request(tokens)
            assert tokens * kv["full_attention_token_bytes"] == memory.full_attention_bytes(tokens)


def test_a_warm_up_is_told_while_it_lasts_and_afterwards(tiny: TinyChat) -> None:
    with live(tiny.load(graphs="replay"), warm_up=True) as server, server.http() as http:
        wait_until(lambda: http.get("/ready").status_code == 200)
        warm_up = http.get("/stats").json()["warm_up"]
        assert warm_up["captured"] == warm_up["total"] > 0


def test_the_package_takes_every_file_of_the_page_along() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [patterns] = re.findall(r'^"hpu_duo\.server" = \["(.+)"\]$', settings, re.MULTILINE)
    for file in FILES:
        name = file.relative_to(ROOT / "hpu_duo/server").as_posix()
        assert fnmatch(name, patterns), name
