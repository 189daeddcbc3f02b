from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import BatchShape
from graphs.bucket_file import ShapeRecorder, read_shapes, write_shapes

DECODE, CHUNK = BatchShape.parse("--u/q4/s0/u40/l4"), BatchShape.parse("cs-/q64/s8/u0/l1")


def record(path: Path, counts: dict[BatchShape, int]) -> None:
    with ShapeRecorder(path) as recorder:
        for shape, count in counts.items():
            recorder.add(shape, count)


def test_recordings_are_counted_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "shapes.jsonl"
    for _ in range(2):
        with ShapeRecorder(path) as recorder:
            recorder.add(DECODE)
            recorder.add(CHUNK, count=3)
    assert read_shapes(path) == {DECODE: 2, CHUNK: 6}
    assert len(path.read_text().splitlines()) == 4


def test_two_recorders_may_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes.jsonl"
    with ShapeRecorder(path) as first, ShapeRecorder(path) as second:
        for _ in range(5):
            first.add(DECODE)
            second.add(CHUNK)
    assert read_shapes(path) == {DECODE: 5, CHUNK: 5}


@given(st.integers(0, 200))
def test_a_line_cut_short_anywhere_is_left_out_and_then_removed(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("recording") / "shapes.jsonl"
    record(path, {DECODE: 1, CHUNK: 2})
    whole = path.read_bytes()
    kept = whole[: min(cut, len(whole))]
    path.write_bytes(kept)
    num_lines = kept.count(b"\n")
    if num_lines:
        assert list(read_shapes(path)) == [DECODE, CHUNK][:num_lines]
    with ShapeRecorder(path) as recorder:
        recorder.add(CHUNK)
    assert sum(read_shapes(path).values()) == [1, 2, 4][num_lines]


def test_several_recordings_are_added_up(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    record(paths[0], {DECODE: 1})
    record(paths[1], {DECODE: 2, CHUNK: 1})
    assert read_shapes(*paths) == {DECODE: 3, CHUNK: 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "expected a JSON object"),
        ("[" * 100_000, "expected a JSON object"),
        ("[1]", 'expected an object with a "shape"'),
        ('{"shape": 3}', 'expected an object with a "shape"'),
        ('{"shape": "x"}', "expected a shape such as"),
        ('{"shape": "--u/q4/s0/u40/l4", "count": 0}', "at least 1, got 0"),
        ('{"shape": "--u/q4/s0/u40/l4", "count": true}', "at least 1, got True"),
        (f'{{"shape": "--u/q4/s0/u40/l4", "count": {10**400}}}', "at least 1, got 1000"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "shapes.jsonl"
    path.write_text(f'{{"shape": "{DECODE}"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=f"line 3: .*{message}"):
        read_shapes(path)


def test_a_file_that_is_no_recording_is_left_alone(tmp_path: Path) -> None:
    for text in ("precious notes\n", "precious notes"):
        path = tmp_path / "notes.txt"
        path.write_text(text)
        with pytest.raises(ValueError, match="expected recorded shapes in"):
            ShapeRecorder(path)
        assert path.read_text() == text
    with pytest.raises(ValueError, match="cannot record shapes in"):
        ShapeRecorder(tmp_path)
    with pytest.raises(ValueError, match=r"cannot record shapes in .*No such file"):
        ShapeRecorder(tmp_path / "missing" / "shapes.jsonl")


def test_an_empty_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shapes.jsonl"
    path.touch()
    with pytest.raises(ValueError, match="at least one recorded shape"):
        read_shapes(path)
    with pytest.raises(ValueError, match="count of at least 1"), ShapeRecorder(path) as recorder:
        recorder.add(DECODE, 0)


def test_counts_are_written_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "shapes.jsonl"
    write_shapes(path, {DECODE: 2, CHUNK: 6})
    assert read_shapes(path) == {DECODE: 2, CHUNK: 6}
    with ShapeRecorder(path) as recorder:
        recorder.add(DECODE)
    assert read_shapes(path) == {DECODE: 3, CHUNK: 6}
