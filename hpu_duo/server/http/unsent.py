"""Number of bytes of a connection that its peer has not acknowledged."""

from __future__ import annotations

import struct
import sys
from asyncio import WriteTransport


def unsent_bytes(transport: WriteTransport) -> int:
    """Return the bytes that the peer has not acknowledged; outside of Linux, those not written.

    Unwritten bytes are not acknowledged either. With TLS, event loops do not report them.
    """
    if sys.platform != "linux":
        return transport.get_write_buffer_size()
    import fcntl
    import termios

    try:
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # the socket is closed
        return 0
    return int(struct.unpack("i", found)[0])
