"""Process groups of one machine: not reachable from outside, and on Linux not by other users.

gloo identifies a rank by the number that it sends when it connects, counted from 0: the first connection with
a number is accepted. Its listening sockets stay open as long as the group. So after the rendezvous, listeners
drop connections, and connections of another user are an error.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

_LOOPBACK = ("lo", "lo0")
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("=HBBI", 6, 0, 0, 0)
"""A filter of packets for ``SO_ATTACH_FILTER``: one instruction, which returns a length of 0."""
_ADDRESS, _PEER, _STATE, _USER, _INODE = 1, 2, 3, 7, 9
"""Columns of ``/proc/net/tcp``."""
_LISTEN, _CLOSE_WAIT = "0A", "08"
_NO_INODE = "0"
"""Inode of a socket without a process; its user is 0 on most kernels."""


@contextmanager
def on_loopback(store: dist.FileStore) -> Iterator[None]:
    """Context manager in which new process groups listen on the loopback interface only.

    At its end, on Linux, their listeners are closed to further connections.

    Args:
        store: rendezvous store, with the addresses of the listeners.

    Raises:
        PermissionError, RuntimeError: see ``check_users``.
    """
    name = next((name for _, name in socket.if_nameindex() if name in _LOOPBACK), None)
    # All connections are established before listeners are closed.
    values = {"TORCH_GLOO_LAZY_INIT": "0", **({} if name is None else {"GLOO_SOCKET_IFNAME": name})}
    before = {each: os.environ.get(each) for each in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for each, value in before.items():
            if value is None:
                del os.environ[each]
            else:
                os.environ[each] = value
    if sys.platform == "linux":
        path = Path(store.path)  # type: ignore[attr-defined]
        ports = _close_listeners(path.read_bytes())
        tables = (Path(f"/proc/self/net/{each}") for each in ("tcp", "tcp6"))
        check_users("".join(table.read_text() for table in tables if table.exists()), ports)


def _close_listeners(known: bytes) -> set[int]:
    """Let listeners of this process drop connections; returns their ports.

    Args:
        known: bytes that contain the addresses of the listeners, in the format of ``sockaddr``.
    """
    ports = set()
    for entry in os.listdir("/proc/self/fd"):
        # Descriptors of other threads may be closed, and some systems have no filters.
        with suppress(OSError), _socket_of(int(entry)) as one:
            if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            if one.family not in {socket.AF_INET, socket.AF_INET6}:
                continue
            port = one.getsockname()[1]
            if struct.pack("=H", one.family) + struct.pack("!H", port) in known:
                ports.add(port)
                program = ctypes.create_string_buffer(_DROP_ALL)
                filter_ = struct.pack("HP", 1, ctypes.addressof(program))
                one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
    return ports


def _socket_of(descriptor: int) -> socket.socket:
    """A socket of its own for an open one; raises ``OSError`` for what is none, and leaves nothing open."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def check_users(table: str, ports: Collection[int]) -> None:
    """Check that connections to ports of this process are of its own user, and open.

    Args:
        table: text of ``/proc/net/tcp``.

    Raises:
        PermissionError: one is of another user.
        RuntimeError: the peer has closed one, as when a rank ends. Its user is unknown.
    """
    rows = [line.split() for line in table.splitlines()]
    rows = [row for row in rows if len(row) > _INODE and row[_ADDRESS] != "local_address"]
    peers = {(row[_ADDRESS], row[_PEER]): row for row in rows}
    for row in rows:
        port = int(row[_ADDRESS].rpartition(":")[2], 16)
        if port not in ports or row[_STATE] == _LISTEN:
            continue
        # A connection that waits to be accepted has no user yet.
        own = str(os.geteuid()) if row[_INODE] == _NO_INODE else row[_USER]
        peer = peers.get((row[_PEER], row[_ADDRESS]))
        is_open = row[_STATE] != _CLOSE_WAIT and (peer is None or peer[_INODE] != _NO_INODE)
        if peer is not None and peer[_USER] != own and (is_open or peer[_USER] != "0"):
            raise PermissionError(
                f"expected connections of user {own} only during the rendezvous of ranks, got one of user "
                f"{peer[_USER]} to port {port}"
            )
        if not is_open:
            raise RuntimeError(f"a peer closed its connection to port {port} during the rendezvous of ranks")
