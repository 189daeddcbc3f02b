"""Bytes of a connection that have not reached its caller yet."""

from __future__ import annotations

import struct
import sys
from asyncio import WriteTransport


def unsent_bytes(transport: WriteTransport) -> int:
    """Count bytes that the caller's system has not acknowledged; outside of Linux, those not written.

    While any are left in this process, there are some that are not acknowledged either. With TLS, event loops
    do not tell of the former.
    """
    if sys.platform != "linux":
        return transport.get_write_buffer_size()
    import fcntl
    import termios

    try:
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # it is closed
        return 0
    return int(struct.unpack("i", found)[0])
