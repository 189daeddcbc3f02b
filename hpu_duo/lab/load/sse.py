"""Parser of server-sent events, from pieces of bytes of any size (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 << 20
"""Bytes of the largest event that is accepted."""

_BOM = b"\xef\xbb\xbf"


class EventStream:
    """The data of events, one after another.

    Lines may end with LF, CR or CRLF; comments and fields other than ``data`` are passed over; several data
    lines of one event are joined with LF. An event that the end of the stream cuts off is dropped.

    Args:
        max_event_bytes: bytes of the largest event that is accepted.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = b""
        self._data: list[bytes] = []
        self._num_data_bytes = 0
        self._is_behind_cr = False
        self._is_at_start = True

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes; returns the data of the events that they complete.

        Raises:
            ValueError: an event has more than ``max_event_bytes``.
        """
        if self._is_behind_cr and data:
            # CRLF is one end of a line, also where the two come apart.
            data, self._is_behind_cr = data.removeprefix(b"\n"), False
        data = self._line + data
        if self._is_at_start:
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._line = data
                return []
            data, self._is_at_start = data.removeprefix(_BOM), False
        if b"\r" in data:
            self._is_behind_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._line = data.split(b"\n")
        events = [event for line in lines if (event := self._take(line)) is not None]
        if len(self._line) + self._num_data_bytes > self._max_event_bytes:
            raise ValueError(f"expected events of at most {self._max_event_bytes} bytes")
        return events

    def _take(self, line: bytes) -> bytes | None:
        """The data of the event that this line ends."""
        if not line:
            if not self._data:
                return None
            event = b"\n".join(self._data)
            self._data, self._num_data_bytes = [], 0
            return event
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._num_data_bytes += len(line)
        return None
