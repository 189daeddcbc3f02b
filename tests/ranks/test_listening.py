"""Ranks of one machine listen on the loopback interface alone."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from hpu_duo.device import Member, run_processes
from hpu_duo.device.heartbeats import may_follow
from hpu_duo.device.loopback import _close_listeners, check_users
from hpu_duo.device.ranks import Ranks, joined

_LISTEN = "0A"


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports of TCP sockets that a process listens on."""
    inodes = {
        os.readlink(path)[8:-1]
        for path in Path(f"/proc/{pid}/fd").iterdir()
        if os.path.islink(path) and os.readlink(path).startswith("socket:[")
    }
    found = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTEN and words[9] in inodes:
                address, port = words[1].split(":")
                raw = bytes.fromhex(address)
                numbers = struct.unpack(f">{len(raw) // 4}I", raw)
                packed = struct.pack(f"={len(numbers)}I", *numbers)
                found.append((socket.inet_ntop(family, packed), int(port, 16)))
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_look_at_all_descriptors_leaves_none_open() -> None:
    reader, writer = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    assert _close_listeners(b"") == set()
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)


def knock(address: str, port: int) -> str:
    """Connect to a port; says what becomes of it within a moment."""
    try:
        with socket.create_connection((address, port), timeout=0.3):
            return "connected"
    except TimeoutError:
        return "dropped"


def meet(member: Member) -> tuple[list[str], list[str], list[object], str]:
    """Join the others.

    Returns:
        The addresses that this process listens on, what becomes of connections to them, what ranks told each
        other behind that, and the mode of the directory.
    """
    own = Ranks(member.rank, member.size)
    with joined(own, "gloo", member.store(), torch.device("cpu"), 60.0) as membership:
        sockets = listening(os.getpid())
        knocks = [knock(*each) for each in sockets]
        told = membership.collect({"rank": member.rank, "text": "x" * member.rank})
        mode = oct(member.directory.stat().st_mode & 0o777)
        return [address for address, _ in sockets], knocks, told, mode


@pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="the sockets of a process are read from /proc"
)
def test_ranks_of_one_machine_listen_on_the_loopback_interface_alone_and_to_nobody_once_they_have_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    for addresses, knocks, told, mode in run_processes(meet, (), [{}, {}]):
        assert set(addresses) <= {"127.0.0.1", "::1"}
        assert knocks == ["dropped"] * len(addresses)
        assert addresses
        assert told == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}]
        assert mode == "0o700"
    assert {address for address, _ in listening(os.getpid())} <= {"127.0.0.1", "::1"}


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 7 1 0
   1: 0100007F:1F90 0100007F:9C40 {state} 00000000:00000000 00:00000000 00000000  1000        0 8 1 0
   2: 0100007F:9C40 0100007F:1F90 01 00000000:00000000 00:00000000 00000000    {user}        0 {inode} 1 0
"""


def table(user: int, inode: int = 9, state: str = "01") -> str:
    return TABLE.format(user=user, inode=inode, state=state)


def test_a_connection_of_another_user_ends_the_meeting() -> None:
    check_users(table(1000), {8080})
    check_users(table(33), {8081})
    for user, inode in ((33, 9), (33, 0), (0, 9)):
        with pytest.raises(PermissionError, match=f"user 1000 only .* got one of user {user} to port 8080"):
            check_users(table(user, inode), {8080})


@pytest.mark.parametrize(
    "row", [{"user": 0, "inode": 0}, {"user": 1000, "inode": 0}, {"user": 0, "inode": 0, "state": "08"}]
)
def test_a_connection_that_its_peer_has_closed_accuses_nobody(row: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="a peer closed its connection to port 8080") as error:
        check_users(table(**row), {8080})
    # So that the rank that has ended is named in place of the one that noticed.
    assert may_follow(error.value)


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs /proc")
def test_the_system_tells_closed_connections_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            check_users(Path("/proc/self/net/tcp").read_text(), {port})
            accepted, _ = listener.accept()
            check_users(Path("/proc/self/net/tcp").read_text(), {port})
        with accepted, pytest.raises(RuntimeError, match="a peer closed"):
            check_users(Path("/proc/self/net/tcp").read_text(), {port})
