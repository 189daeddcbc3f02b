"""Ranks of one machine listen on the loopback interface alone."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest
import torch

from hpu_duo.device import Member, run_processes
from hpu_duo.device.ranks import Ranks, joined

_LISTEN = "0A"


def listening(pid: int) -> list[str]:
    """Addresses of TCP sockets that a process listens on."""
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
                raw = bytes.fromhex(words[1].split(":")[0])
                numbers = struct.unpack(f">{len(raw) // 4}I", raw)
                packed = struct.pack(f"={len(numbers)}I", *numbers)
                found.append(socket.inet_ntop(family, packed))
    return found


def meet(member: Member) -> tuple[list[str], list[object], str]:
    """Join the others; returns the addresses that this process listens on, and what they told each other."""
    own = Ranks(member.rank, member.size)
    with joined(own, "gloo", member.store(), torch.device("cpu"), 60.0) as membership:
        told = membership.collect({"rank": member.rank, "text": "x" * member.rank})
        return listening(os.getpid()), told, oct(member.directory.stat().st_mode & 0o777)


@pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="the sockets of a process are read from /proc"
)
def test_ranks_of_one_machine_listen_on_the_loopback_interface_alone() -> None:
    for addresses, told, mode in run_processes(meet, (), [{}, {}]):
        assert set(addresses) <= {"127.0.0.1", "::1"}
        assert told == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}]
        assert mode == "0o700"
    assert set(listening(os.getpid())) <= {"127.0.0.1", "::1"}
