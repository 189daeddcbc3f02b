"""Process groups of one machine, which nobody outside of it can reach."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = ("lo", "lo0")


@contextmanager
def on_loopback() -> Iterator[None]:
    """Have process groups that are made inside the context listen on the loopback interface alone."""
    name = next((name for _, name in socket.if_nameindex() if name in _LOOPBACK), None)
    before = os.environ.get(_INTERFACE)
    if name is not None:
        os.environ[_INTERFACE] = name
    try:
        yield
    finally:
        if before is not None:
            os.environ[_INTERFACE] = before
        else:
            os.environ.pop(_INTERFACE, None)
