"""Engines on Ray Serve, called over HTTP: what they answer, and what becomes of calls whose replica ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai import OpenAI

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR
from tests.replicas.streams import texts_and_ends
from tests.server.live import live

if TYPE_CHECKING:
    from tests.ray_serve.clusters import Cluster

pytestmark = pytest.mark.slow

PROMPT = "The passkey for Joel is loom actor camel."
LONG: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 600, "ignore_eos": True}
SHORT: dict[str, Any] = {**LONG, "max_tokens": 60}
HEALTH = {"health_check_period_s": 0.5, "health_check_timeout_s": 4.0}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install -e '.[ray]'")
    from tests.ray_serve.clusters import Cluster

    with pytest.MonkeyPatch.context() as patch:
        # Ray writes the token of its own connections to the home folder; built kernels stay where they are.
        patch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")))
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Ray ends a proxy that is not up within 5 s, which imports take on busy cores.
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
        with closing(Cluster()) as running:
            yield running


@pytest.fixture(scope="module")
def expected() -> str:
    """The answer to ``LONG`` of a server without Ray."""
    from tests.ray_serve.clusters import PATIENCE_S, SMALL

    model = HPUDuoModel.from_pretrained(MODEL_DIR, device="cpu", **SMALL)
    with live(model) as server, server.http(timeout=PATIENCE_S) as http:
        return text_of(http.post("/v1/completions", json=LONG))


def text_of(answer: httpx.Response) -> str:
    """Text of a whole answer."""
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def is_right(answer: httpx.Response, expected: str) -> bool:
    """Whether an answer to ``SHORT`` is the beginning of that to ``LONG``."""
    text = text_of(answer)
    return len(text) > 60 and expected.startswith(text)


def test_answers_are_those_of_a_server_alone_and_prefixes_stay_together(
    cluster: Cluster, expected: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a key\nother key\n")
    cluster.deploy(num_replicas=2, router="e2:min_cached=0", api_key_file=str(keys))
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="a key", max_retries=0) as client:
        whole = client.completions.create(
            model="builtin", prompt=PROMPT, temperature=0, max_tokens=600, extra_body={"ignore_eos": True}
        )
        assert whole.choices[0].text == expected
        streamed = client.completions.create(
            model="builtin", prompt=PROMPT, temperature=0, max_tokens=5, stream=True
        )
        text = "".join(each.choices[0].text for each in streamed)
        assert text
        assert expected.startswith(text)
        # Beginnings of their own, longer than a block, each several times: half of all goes to each replica.
        for turn in range(3):
            for name in ("Adam", "Ruth"):
                story = f"{name} walked on. " * 8
                client.completions.create(model="builtin", prompt=f"{story} Turn {turn}.", max_tokens=1)
        assert client.models.list().data[0].id == "builtin"
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="other key", max_retries=0) as client:
        usage = client.completions.create(model="builtin", prompt=PROMPT, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 0
    with cluster.http() as http:
        assert http.post("/v1/completions", json=LONG).status_code == 401
        assert http.get("/nowhere", headers={"Authorization": "Bearer a key"}).status_code == 404
        assert all(http.get(path).status_code == 200 for path in ("/live", "/health", "/ready"))
    assert cluster.counted("replica_up") == 2
    assert cluster.counted("router_open_requests") == 0
    assert cluster.counted("router_hit_tokens_total") > 0
    assert cluster.counted("router_expected_hit_tokens_total") > 0
    assert cluster.counted("router_broken_answers_total") == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("router", ["d2lpm:quantum=1000000,min_cached=0", "cache-aware:min_cached=0"])
def test_other_routers_by_prefix_find_beginnings_again(router: str, cluster: Cluster, expected: str) -> None:
    # The replicas of the test before: only the ingress starts anew.
    cluster.deploy(num_replicas=2, router=router)
    with cluster.http() as http:
        assert is_right(http.post("/v1/completions", json={**SHORT, "user": "Joel"}), expected)
        asked = [
            {"prompt": f"{name} sat down. " * 8 + f"Turn {turn}.", "max_tokens": 1, "user": name}
            for turn in range(3)
            for name in ("Noah", "Anna")
        ]
        answers = [http.post("/v1/completions", json=each) for each in asked]
        assert all(each.status_code == 200 for each in answers)
    assert cluster.counted("router_requests_total") >= len(asked)
    assert cluster.counted("router_hit_tokens_total") > 0
    assert cluster.counted("router_expected_hit_tokens_total") > 0
    assert cluster.counted("router_open_requests") == cluster.counted("router_broken_answers_total") == 0


def test_a_replica_that_is_killed_takes_no_answer_for_complete_and_comes_back(
    cluster: Cluster, expected: str
) -> None:
    cluster.deploy(num_replicas=2, router="least-loaded", **HEALTH)
    with cluster.http() as http:
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            seen = [next(lines) for _ in range(6)]
            first = cluster.busy()
            os.kill(cluster.pid(first), signal.SIGKILL)
            seen += lines
        text, ends = texts_and_ends(seen)
        assert ends == ["replica_lost"]
        assert expected.startswith(text)
        assert len(text) < len(expected)
        # The other one serves, and answers the same; so does the one that Ray starts.
        assert is_right(http.post("/v1/completions", json=SHORT), expected)
        cluster.wait_until(lambda: len(cluster.replicas()) == 2 and first not in cluster.replicas())
        # A call of which nothing was answered is sent once more.
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(http.post, "/v1/completions", json=LONG)
            os.kill(cluster.pid(cluster.busy()), signal.SIGKILL)
            assert text_of(whole.result()) == expected
    assert cluster.counted("router_retries_total") == 1
    assert cluster.counted("router_broken_answers_total") == 2
    cluster.wait_until(lambda: len(cluster.replicas()) == 2)


@pytest.mark.exhaustive
def test_a_replica_that_hangs_is_found_by_its_health_check_and_replaced(
    cluster: Cluster, expected: str
) -> None:
    cluster.deploy(num_replicas=2, router="least-loaded", **HEALTH)
    with cluster.http() as http:
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            seen = [next(lines) for _ in range(6)]
            hung = cluster.busy()
            pid = cluster.pid(hung)
            os.kill(pid, signal.SIGSTOP)
            try:
                seen += lines
            finally:
                if os.path.exists(f"/proc/{pid}"):
                    os.kill(pid, signal.SIGCONT)
        text, ends = texts_and_ends(seen)
        assert ends == ["replica_lost"]
        assert expected.startswith(text)
        assert is_right(http.post("/v1/completions", json=SHORT), expected)
    cluster.wait_until(lambda: len(cluster.replicas()) == 2 and hung not in cluster.replicas())


def test_a_caller_who_leaves_frees_the_engine(cluster: Cluster) -> None:
    cluster.deploy(num_replicas=2, router="least-loaded", **HEALTH)
    with cluster.http() as http:
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()  # which closes the stream when nobody holds it
            assert next(lines)
            assert cluster.busy()
        cluster.wait_until(lambda: all(each and not each["num_open"] for each in cluster.replicas().values()))
        cluster.wait_until(lambda: cluster.counted("router_open_requests") == 0)


@pytest.mark.exhaustive
def test_replicas_follow_the_queue_and_calls_too_many_are_turned_away(
    cluster: Cluster, expected: str
) -> None:
    cluster.deploy(
        max_ongoing_requests=2,
        max_queued_requests=2,
        router="least-loaded",
        autoscaling_config={
            "min_replicas": 1,
            "max_replicas": 2,
            "target_ongoing_requests": 1,
            "upscale_delay_s": 0.5,
            "downscale_delay_s": 2.0,
            "metrics_interval_s": 0.2,
            "look_back_period_s": 1.0,
        },
    )
    statuses: list[int] = []
    with cluster.http() as http, ThreadPoolExecutor(8) as pool:

        def call(_: int) -> None:
            answer = http.post("/v1/completions", json=SHORT)
            statuses.append(answer.status_code)
            assert answer.status_code == 429 or is_right(answer, expected)
            assert answer.status_code == 200 or answer.headers["retry-after"]

        def calls() -> bool:
            list(pool.map(call, range(8)))
            return len(cluster.replicas()) == 2

        cluster.wait_until(calls)
    assert set(statuses) == {200, 429}
    cluster.wait_until(lambda: len(cluster.replicas()) == 1)


@pytest.mark.exhaustive
def test_an_update_takes_replicas_one_after_the_other_and_no_call_notices(
    cluster: Cluster, expected: str
) -> None:
    cluster.deploy(num_replicas=2, router="round-robin")
    names: set[str] = set()
    with cluster.http() as http, ThreadPoolExecutor(2) as pool:

        def calls() -> int:
            num = 0
            while "another" not in names or num < 20:
                answer = http.post("/v1/completions", json=SHORT)
                assert is_right(answer, expected)
                names.add(answer.json()["model"])
                num += 1
            return num

        calling = [pool.submit(calls) for _ in range(2)]
        cluster.deploy(num_replicas=2, router="round-robin", served_model_name="another")
        assert all(each.result() >= 20 for each in calling)
    assert names == {"builtin", "another"}


@pytest.mark.exhaustive
def test_ranks_of_a_replica_lie_in_one_bundle_and_end_together(cluster: Cluster, expected: str) -> None:
    cluster.deploy(tensor_parallel_size=2, router="least-loaded", **HEALTH)
    with cluster.http() as http:
        assert is_right(http.post("/v1/completions", json=SHORT), expected)
        (first,) = cluster.replicas()
        pid = cluster.pid(first)
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            seen = [next(lines) for _ in range(6)]
            os.kill(rank_of(pid), signal.SIGKILL)
            seen += lines
        text, ends = texts_and_ends(seen)
        # The replica is there, and tells by itself that its engine is not.
        assert ends[0] == "unavailable"
        assert not {"length", "stop"}.intersection(ends)
        assert expected.startswith(text)
        cluster.wait_until(lambda: list(cluster.replicas()) not in ([], [first]))
        assert is_right(http.post("/v1/completions", json=SHORT), expected)


def rank_of(pid: int) -> int:
    """Process of the other rank of a replica."""
    children = [int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in children_of(task)]
    (rank,) = (each for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes())
    return rank


def children_of(task: Path) -> list[str]:
    """Processes that a thread has started."""
    return (task / "children").read_text().split()
