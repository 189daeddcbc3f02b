"""Rank 0 hears of other ranks over their connections."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from hpu_duo.device.heartbeats import Heartbeat, Heartbeats
from hpu_duo.device.processes import HOST, store_in

SIZE = 3


@pytest.fixture
def store(tmp_path: Path) -> dist.Store:
    return store_in(tmp_path)


@pytest.fixture
def heartbeats(store: dist.Store) -> Iterator[Heartbeats]:
    made = Heartbeats(HOST, SIZE, store)
    yield made
    made.close()


def look_until(heartbeats: Heartbeats, is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        heartbeats.look()


def test_ranks_come_give_signs_of_life_and_say_that_they_end(
    heartbeats: Heartbeats, store: dist.Store
) -> None:
    assert heartbeats.missing == [1, 2]
    ranks = [Heartbeat(rank, store, 60.0) for rank in (2, 1)]
    look_until(heartbeats, lambda: not heartbeats.missing)
    began = time.monotonic()
    look_until(heartbeats, lambda: time.monotonic() - began > 1.5)
    assert max(heartbeats.signs().silent_s.values()) < 1.4
    for rank in ranks:
        rank.close()
    look_until(heartbeats, lambda: heartbeats.have_ended)
    assert not heartbeats.signs().are_bad(1.0)


def test_an_error_is_told_once_with_its_trace_and_whether_it_may_follow_from_anothers(
    heartbeats: Heartbeats, store: dist.Store
) -> None:
    first, second = (Heartbeat(rank, store, 60.0) for rank in (1, 2))
    with pytest.raises(ValueError, match="odd"), first.reporting(), first.reporting():
        raise ValueError("odd\nand more")
    with pytest.raises(RuntimeError), second.reporting():
        raise RuntimeError("Connection closed by peer")
    look_until(heartbeats, lambda: len(heartbeats.signs().reports) == 2)
    told = {each.rank: each for each in heartbeats.signs().reports}
    assert "ValueError: odd" in told[1].trace
    assert "and more" in told[1].trace
    assert (told[1].may_follow, told[2].may_follow) == (False, True)
    assert told[2].message == "RuntimeError: Connection closed by peer"
    first.close()
    second.close()


def test_strangers_are_turned_away_and_a_connection_that_ends_without_a_word_is_a_rank_that_is_gone(
    heartbeats: Heartbeats, store: dist.Store
) -> None:
    host, port, token = json.loads(store.get("hpu-duo/heartbeats"))

    def connect(words: bytes) -> socket.socket:
        connection = socket.create_connection((host, port))
        connection.sendall(words)
        return connection

    strangers = [
        connect(words)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 1, "token": "guessed"}\n', b"[]\n", b"\xff\n")
    ]
    for stranger in strangers:
        stranger.settimeout(0.01)

        def is_closed(one: socket.socket = stranger) -> bool:
            try:
                return one.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        look_until(heartbeats, is_closed)
    assert heartbeats.missing == [1, 2]
    rank = connect(json.dumps({"rank": 1, "token": token}).encode() + b'\n{"done": 3}\n')
    look_until(heartbeats, lambda: heartbeats.missing == [2])
    assert not heartbeats.signs().gone
    look_until(heartbeats, lambda: heartbeats.signs().num_done == {1: 3})
    rank.close()
    look_until(heartbeats, lambda: heartbeats.signs().gone)
    assert heartbeats.signs().gone == {1}
