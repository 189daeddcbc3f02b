"""Parts of calls and answers that the front process reads."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.cli.serving.options import replica_arguments
from hpu_duo.device.processes import replica_environments
from hpu_duo.fleet.replicas import front
from hpu_duo.fleet.replicas.front import RoutedCall, read_call
from hpu_duo.fleet.replicas.relaying import WholeEvents, counts_of

USAGE = {"prompt_tokens": 10, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
EVENTS = [b'data: {"a":1}\n\n', b": keep-alive\n\n", b"data: %b\n\n" % json.dumps({"usage": USAGE}).encode()]


@given(
    which=st.lists(st.sampled_from(EVENTS), max_size=5),
    is_done=st.booleans(),
    rest=st.sampled_from([b"", b"data: [DO", b'data: {"error"', b"data: [DONE]\n"]),
    cuts=st.lists(st.integers(0, 300), max_size=6),
)
def test_events_are_passed_on_whole_however_they_come(
    which: list[bytes], is_done: bool, rest: bytes, cuts: list[int]
) -> None:
    whole = b"".join(which) + (b"data: [DONE]\n\n" if is_done else b"")
    text, places = whole + rest, [0, *sorted(cuts), 10**6]
    events, passed = WholeEvents(), b""
    for start, end in pairwise(places):
        passed += events.feed(text[start:end])
        assert not passed or passed.endswith(b"\n\n")
    assert passed == whole
    assert events.is_done == is_done
    assert not events.is_error
    num = sum(each.startswith(b"data") for each in which)
    assert events.has_data == (num > 0)
    if EVENTS[2] not in which:
        assert events.counts.num_outputs == num


def test_usage_is_read_where_there_is_any() -> None:
    events = WholeEvents()
    events.feed(EVENTS[0] + EVENTS[2])
    assert (events.counts.num_outputs, events.counts.num_cached_share) == (7, 0.4)
    assert counts_of(json.dumps({"usage": USAGE}).encode()).num_outputs == 7
    for body in (b"", b"[]", b"null", b'{"usage": null}', b'{"usage": {"completion_tokens": "x"}}'):
        assert counts_of(body).num_cached_share is None


@pytest.mark.parametrize(
    ("fields", "units"),
    [
        ({"prompt": "abc"}, [97, 98, 99]),
        ({"prompt": [5, 6]}, [5, 6]),
        ({"prompt": [[5, 6], [7]]}, [5, 6]),
        ({"prompt": ["ab", "c"]}, [97, 98]),
        ({"prompt": None}, []),
        ({"prompt": 7}, [ord("7")]),
        ({"prompt": [-1]}, list(map(ord, "[-1]"))),
        ({}, []),
        ([1], []),
    ],
)
def test_prompts_are_compared_by_characters_or_token_ids(fields: object, units: list[int]) -> None:
    assert read_call("1", json.dumps(fields).encode()).request.units.tolist() == units


def test_conversations_that_begin_alike_are_alike() -> None:
    def read(*contents: str, **more: object) -> list[int]:
        messages = [{"role": "user", "content": each} for each in contents]
        body = json.dumps({"messages": messages, "prompt": "not this", **more}).encode()
        call = read_call("1", body)
        assert (call.request.user, call.request.namespace) == ("ann", "salt")
        return call.request.units.tolist()

    known = {"user": "ann", "cache_salt": "salt"}
    first = read("Hello", "there", **known)
    assert read("Hello", "you", **known)[:40] == first[:40]
    assert read("Hello", tools=[{"type": "function"}], **known)[:5] != first[:5]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 10_000])
def test_what_is_no_json_has_no_prompt(body: bytes) -> None:
    call = read_call("1", body)
    assert (call.request.num_tokens, call.is_streamed) == (0, False)


def test_long_calls_are_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []

    def noted(call_id: str, body: bytes, key_name: str | None) -> RoutedCall:
        names.append(threading.current_thread())
        return read_call(call_id, body, key_name)

    monkeypatch.setattr(front, "read_call", noted)
    for text in ("hi", "hi" * 10_000):
        body = json.dumps({"prompt": text}).encode()
        found = asyncio.run(front.read_beside("1", body))
        assert found.request.num_tokens == read_call("1", body).request.num_tokens > 0
    assert [one is threading.main_thread() for one in names] == [True, False]


def test_replicas_are_started_without_what_is_the_fronts_own() -> None:
    own = "serve --replicas 2 --router=e2 --model DIR --port 8 --ssl_certfile F --host=0.0.0.0"
    own += " --max-unauthenticated-connections 9"
    assert replica_arguments([*own.split(), "--max-num-seqs", "3"]) == [
        "serve",
        "--model",
        "DIR",
        "--max-num-seqs",
        "3",
    ]


def test_each_replica_sees_its_share_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "4,5,6,7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = replica_environments(2, 2)
    assert [each["HABANA_VISIBLE_MODULES"] for each in found] == ["4,5", "6,7"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0,1", "2,3"]
    host = replica_environments(2, 0)
    assert [each["HABANA_VISIBLE_MODULES"] for each in host] == ["4,5,6,7"] * 2
    with pytest.raises(ValueError, match="HABANA_VISIBLE_MODULES to list 6 devices, got 4,5,6,7"):
        replica_environments(3, 2)
