"""Results that go on after a kill, and files that are left alone."""

import errno
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_duo.lab.eval.result_file import ResultFile, ResultsNotWrittenError, refuse_existing

SETTINGS = {"model": "tiny", "lengths": (1, 2)}


def write(path: Path, num: int) -> bytes:
    results = ResultFile(path, "niah", SETTINGS)
    for number in range(num):
        results.append({"cell": number, "score": number / 3})
    return path.read_bytes()


def test_records_come_back(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "results.jsonl", 3)
    again = ResultFile(tmp_path / "deep" / "results.jsonl", "niah", SETTINGS)
    assert [record["cell"] for record in again.records] == [0, 1, 2]
    assert again.find(cell=1) == {"cell": 1, "score": 1 / 3}
    assert again.find(cell=1, score=0) is None


def test_nothing_is_written_before_the_first_record(tmp_path: Path) -> None:
    ResultFile(tmp_path / "results.jsonl", "niah", SETTINGS)
    assert not list(tmp_path.iterdir())


@settings(max_examples=30)
@given(data=st.data())
def test_a_file_cut_anywhere_is_gone_on_with_to_the_same_end(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "results.jsonl"
    whole = write(path, 3)
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    results = ResultFile(path, "niah", SETTINGS)
    for number in range(len(results.records), 3):
        results.append({"cell": number, "score": number / 3})
    # A cut right behind the last line leaves nothing to do; behind its newline is the whole file.
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"my notes", "another one"),
        (b"my notes\n", "another one"),
        (b'{"format": "hpu-duo eval 2", "kind": "ruler", "settings": {}}\n', "another one"),
        (b"[1, 2]\nx\n", "another one"),
        (
            b'{"format": "hpu-duo eval 2", "kind": "niah",'
            b' "settings": {"model": "big", "lengths": [1, 2]}}\n',
            "model='big' \\(asked: 'tiny'\\)",
        ),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        ResultFile(path, "niah", SETTINGS)
    assert path.read_bytes() == content


@pytest.mark.parametrize("line", [b"{half", b"[]"])
def test_a_broken_line_in_the_middle_is_refused_and_left_alone(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "results.jsonl"
    lines = write(path, 2).split(b"\n")
    path.write_bytes(b"\n".join([lines[0], line, *lines[1:]]))
    with pytest.raises(ValueError, match="JSON object in line 2"):
        ResultFile(path, "niah", SETTINGS)
    assert json.loads(path.read_bytes().split(b"\n")[0])["kind"] == "niah"


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_full_disk_loses_no_earlier_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    path = tmp_path / "results.jsonl"
    results = ResultFile(path, "niah", SETTINGS)
    for number in range(num_before):
        results.append({"cell": number, "score": number / 3})
    before = path.read_bytes() if num_before else b""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(
            ResultsNotWrittenError,
            match=f"{re.escape(str(path))}: No space left on device; it holds {num_before} of them",
        ):
            results.append({"cell": num_before, "score": 1.0})
    assert path.read_bytes() == before
    assert len(results.records) == num_before
    again = ResultFile(path, "niah", SETTINGS)
    for number in range(num_before, 3):
        again.append({"cell": number, "score": number / 3})
    assert path.read_bytes() == write(tmp_path / "other.jsonl", 3)


def test_files_that_exist_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    with pytest.raises(ValueError, match=r"a\.png"):
        refuse_existing([tmp_path / "a.png", tmp_path / "b.png"])
    refuse_existing([tmp_path / "b.png"])
