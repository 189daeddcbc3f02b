"""Server-sent events: the same events, however the bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.lab.load.sse import EventStream

LINES = st.sampled_from(
    [
        b"data: one",
        b"data:two",
        b"data:  three",
        b"data",
        b"data:",
        b": comment",
        b"event: x",
        b"id: 4",
        b"",
        b"",
        b"",
    ]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


def reference(text: str) -> list[bytes]:
    """The specification's words, line by line over the whole text at once."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]
    found, data = [], ""
    for line in lines:
        if line == "":
            if data:
                found.append(data[:-1].encode())
            data = ""
        elif line == "data":
            data += "\n"
        elif line.startswith("data:"):
            value = line[5:]
            data += (value[1:] if value[:1] == " " else value) + "\n"
    return found


@given(
    lines=st.lists(st.tuples(LINES, ENDS), max_size=20),
    has_mark=st.booleans(),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_the_same_events_come_however_the_bytes_are_cut(
    lines: list[tuple[bytes, bytes]], has_mark: bool, cuts: list[int]
) -> None:
    data = (b"\xef\xbb\xbf" if has_mark else b"") + b"".join(line + end for line, end in lines)
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    stream = EventStream()
    found = [event for at, end in pairwise(borders) for event in stream.feed(data[at:end])]
    assert found == reference(data.decode("utf-8"))


def test_an_event_without_its_end_is_none() -> None:
    stream = EventStream()
    assert stream.feed(b"data: a\n\ndata: b\n") == [b"a"]


def test_characters_are_put_together_again() -> None:
    stream, data = EventStream(), "data: zwölf 🌊\n\n".encode()
    assert [event for at in range(len(data)) for event in stream.feed(data[at : at + 1])] == [
        "zwölf 🌊".encode()
    ]


@pytest.mark.parametrize("piece", [b"data: xxxxxxxxx\n", b"xxxxxxxxxxxxxxxx"])
def test_an_event_without_end_is_refused(piece: bytes) -> None:
    stream = EventStream(max_event_bytes=100)
    for _ in range(5):
        stream.feed(piece)
    with pytest.raises(ValueError, match="at most 100 bytes"):
        stream.feed(piece * 4)
