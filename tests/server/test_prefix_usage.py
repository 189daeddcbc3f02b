"""Cached tokens of real engines in ``usage``, and the prefix cache in the metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpu_duo import HeadPattern
from tests.engine.tiny import PATTERN
from tests.modeling.families import BLOCK
from tests.server.conftest import TinyChat
from tests.server.live import Live, live, wait_until
from tests.server.test_metrics import samples

TEXT = "Once upon a time there was a little model"
ASKED: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "max_tokens": 1}
HIT = (len(TEXT) - 1) // BLOCK * BLOCK


def _cached(server: Live, **fields: Any) -> int:
    with server.http() as http:
        answer = http.post("/v1/completions", json={**ASKED, **fields})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(cached, int)
    return cached


@pytest.mark.parametrize("pattern", [None, PATTERN], ids=["full", "duo"])
def test_usage_says_how_many_tokens_of_a_prompt_were_cached(
    tiny: TinyChat, pattern: HeadPattern | None
) -> None:
    with live(tiny.load(pattern=pattern, max_num_batched_tokens=64)) as server:
        assert _cached(server) == 0
        assert _cached(server) == HIT
        assert _cached(server, prompt=TEXT[: HIT - 3]) == (0 if pattern else HIT - BLOCK)
        assert _cached(server, cache_salt="a") == 0
        assert _cached(server, cache_salt="a") == HIT
        # Once for each prompt, however many answers it gets.
        assert _cached(server, prompt=[TEXT, TEXT], n=2) == 2 * HIT
        assert _cached(server, prompt="!" + TEXT) == 0


def test_tokens_from_host_memory_are_cached_tokens(tiny: TinyChat, tmp_path: Path) -> None:
    """Metrics say in which tiers their blocks are."""
    few = {"num_blocks": 16, "max_model_len": 64, "kv_offloading_size": 0.05}
    disk = {"kv_offloading_disk": str(tmp_path), "kv_offloading_disk_size": 0.05}
    with live(tiny.load(**few, **disk, kv_offloading_write_policy="write_through")) as server:
        found = [_cached(server, prompt=prompt) for prompt in (TEXT, "!" + TEXT, "?" + TEXT, TEXT)]
        offload = server.model.stats().offload
        place = "hpuduo:offload_records,state={},tier={}"
        on_host, on_disk = (place.format("present", tier) for tier in ("host", "disk"))
        wait_until(lambda: (found_now := samples(server))[on_disk] == found_now[on_host] > 0)
        now = samples(server)
    assert 0 < now[place.format("present", "device")] <= 16
    ways = (("leaving", "device"), ("to_device", "host"), ("to_disk", "host"), ("to_host", "disk"))
    assert [now[place.format(*way)] for way in ways] == [0, 0, 0, 0]
    assert now["hpuduo:offload_disk_written_seconds_total"] > 0
    assert found == [0, 0, 0, HIT]
    assert offload is not None
    assert offload.num_hit_tokens > 0


def test_streams_and_chats_tell_it_too(tiny: TinyChat) -> None:
    with live(tiny.load()) as server:
        create = server.client().completions.create
        create(**ASKED)
        *_, last = create(**ASKED, stream=True, stream_options={"include_usage": True})
        assert last.usage.prompt_tokens_details.cached_tokens == HIT
        chat = server.client().chat.completions.create
        messages: list[Any] = [{"role": "user", "content": TEXT}]
        found = [chat(model="tiny", messages=messages, max_tokens=1).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in found if usage is not None]
    assert found[0] is not None
    assert cached == [0, (found[0].prompt_tokens - 1) // BLOCK * BLOCK]


def test_nothing_is_cached_without_a_cache(tiny: TinyChat) -> None:
    with live(tiny.load(enable_prefix_caching=False)) as server:
        assert [_cached(server), _cached(server)] == [0, 0]
        found = samples(server)
    assert found["hpuduo:prefix_cache_queries_total"] == found["hpuduo:prefix_idle_bytes"] == 0


def test_metrics_tell_idle_bytes_contexts_and_snapshots_apart(tiny: TinyChat) -> None:
    model = tiny.load(pattern=PATTERN, max_num_batched_tokens=64)
    context = model.prefill([3] * 2 * BLOCK)
    with live(model) as server:
        _cached(server)
        _cached(server)
        wait_until(lambda: samples(server)["hpuduo:prefix_cache_hits_total"] == HIT)
        found, told = samples(server), model.stats().prefixes
        assert told is not None
        assert (told.num_held_blocks, told.num_idle_blocks) == (2, HIT // BLOCK + 1)
        for name in ("idle", "context", "snapshot"):
            assert found[f"hpuduo:prefix_{name}_bytes"] == getattr(told, f"{name}_bytes") > 0
        assert found["hpuduo:prefix_cache_queries_total"] == 2 * BLOCK + 2 * len(TEXT)
        context.close()


@pytest.mark.parametrize("shares", [False, True])
def test_callers_with_different_keys_share_no_prefix_unless_they_are_to(tiny: TinyChat, shares: bool) -> None:
    theirs = HIT if shares else 0
    with live(tiny.load(), api_keys=("a", "b"), shares_prefixes=shares) as server:

        def cached(key: str, **fields: Any) -> int:
            usage = server.client(api_key=key).completions.create(**ASKED, **fields).usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            return usage.prompt_tokens_details.cached_tokens or 0

        assert [cached("a"), cached("b"), cached("b"), cached("a")] == [0, theirs, HIT, HIT]
        salted = {"extra_body": {"cache_salt": "s"}}
        assert [cached("b", **salted), cached("a", **salted), cached("a", **salted)] == [0, theirs, HIT]


def test_prompts_that_are_scored_keep_to_their_salt_too(tiny: TinyChat) -> None:
    scored: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 0}
    with live(tiny.load()) as server:
        _cached(server, **scored, cache_salt="a")
        assert _cached(server) == 0
        assert _cached(server, cache_salt="a") == HIT
