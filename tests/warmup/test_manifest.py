"""The manifest as a value and as a file: whole at any moment, and of one configuration."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import BatchShape, StepCost
from graphs.bucket_file import write_table
from graphs.manifest import GraphRecord, Manifest, is_manifest, read_manifest, write_manifest
from graphs.table import PlannedPadding

VERSIONS = {"torch": "2.13.0", "python": "3.11.7"}
CONFIGURATION = {"model.hidden_size": 32, "dtype": "float32", "limits.num_blocks": 48, "model.rope": None}
GRAPHS = (
    GraphRecord(BatchShape.parse("csu/q16/s8/u48/l4"), 1.5, 4096),
    GraphRecord(BatchShape.parse("--u/q4/s0/u48/l4")),
)
MANIFEST = Manifest(CONFIGURATION, VERSIONS, GRAPHS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "manifest.json"
    write_manifest(file, MANIFEST)
    return file


def changed(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path


_sizes = st.integers(0, 10_000)
_shapes = st.builds(
    lambda q, s, u, rows: BatchShape.parse(f"csu/q{q + 1}/s{s}/u{u}/l{rows}"), _sizes, _sizes, _sizes, _sizes
)
_values = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
_records = st.builds(
    GraphRecord,
    _shapes,
    st.none() | st.floats(0, 1e6),
    st.none() | st.integers(-(2**40), 2**40),
    st.none() | st.text(),
    st.none() | st.floats(0, 1e6),
)


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(st.text(), _values),
    st.dictionaries(st.text(), st.text()),
    st.lists(_records, min_size=1, unique_by=lambda record: record.shape),
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    configuration: dict[str, Any],
    versions: dict[str, str],
    records: list[GraphRecord],
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.json"
    manifest = Manifest(configuration, versions, tuple(records))
    write_manifest(path, manifest)
    read = read_manifest(path)
    assert read == manifest
    assert is_manifest(path)
    read.check(configuration, {})


def test_the_padding_that_a_table_was_planned_for_is_kept(path: Path) -> None:
    planned_padding = PlannedPadding.by(StepCost(), 0.125)
    write_manifest(path, replace(MANIFEST, planned_padding=planned_padding))
    assert read_manifest(path).table().planned_padding == planned_padding
    fields = json.loads(path.read_text())
    del fields["promise"]
    path.write_text(json.dumps(fields))
    assert read_manifest(path).table().planned_padding is None
    with pytest.raises(ValueError, match="expected promise to be a text such as"):
        read_manifest(changed(path, promise="little"))


def test_the_file_says_what_a_reader_looks_for(path: Path) -> None:
    fields = json.loads(path.read_text())
    assert fields["phases"] == {"--u": 1, "csu": 1}
    assert fields["graphs"][0] == {
        "shape": "csu/q16/s8/u48/l4",
        "seconds": 1.5,
        "bytes": 4096,
        "trace_seconds": None,
        "cache": None,
    }
    assert not fields["is_complete"]
    canonical = json.dumps(CONFIGURATION, sort_keys=True)
    assert fields["digest"] == hashlib.sha256(canonical.encode()).hexdigest()


def test_each_differing_entry_is_named_with_both_values() -> None:
    running = {**CONFIGURATION, "model.hidden_size": 64, "dtype": "bfloat16", "limits.new": 3}
    with pytest.raises(ValueError, match="3 of its entries differ") as raised:
        MANIFEST.check(running, VERSIONS)
    message = str(raised.value)
    assert "model.hidden_size: expected 32, got 64" in message
    assert "dtype: expected float32, got bfloat16" in message
    assert "limits.new: expected nothing, got 3" in message
    assert "num_blocks" not in message


def test_software_is_told_where_configurations_differ_and_refused_nowhere() -> None:
    newer = {**VERSIONS, "torch": "2.14.0"}
    MANIFEST.check(CONFIGURATION, newer)
    assert MANIFEST.differing_versions(newer) == ["torch 2.13.0 then, 2.14.0 now"]
    with pytest.raises(ValueError, match=r"other software: torch 2\.13\.0 then, 2\.14\.0 now"):
        MANIFEST.check({**CONFIGURATION, "dtype": "float16"}, newer)


def test_many_differences_are_counted_and_not_all_told() -> None:
    wide = Manifest({f"layer_{n:02}": 1 for n in range(40)}, VERSIONS, GRAPHS)
    with pytest.raises(ValueError, match="40 of its entries differ") as raised:
        wide.check({f"layer_{n:02}": 2 for n in range(40)}, VERSIONS)
    assert "and 32 more" in str(raised.value)
    assert "layer_20" not in str(raised.value)


def test_what_is_not_known_yet_is_not_compared() -> None:
    MANIFEST.check({"dtype": "float32"}, VERSIONS, known_only=True)
    with pytest.raises(ValueError, match="1 of its entries differ: dtype"):
        MANIFEST.check({"dtype": "float16"}, VERSIONS, known_only=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "other"}, "expected a warm-up manifest in .*, got 'other'"),
        ({"version": 2}, "format version 1 or older in .*, got 2: it was written by a newer HPU-Duo"),
        ({"version": "one"}, "expected version to be 1, got 'one'"),
        ({"configuration": {"dtype": "float16"}}, "was changed after it was written: expected .* digest"),
        ({"configuration": []}, r"expected configuration to be a dict, got \[\]"),
        ({"versions": {"torch": 2}}, "expected versions.torch to be a text, got 2"),
        ({"graphs": []}, "expected graphs to be at least one, got 'none'"),
        ({"graphs": ["x"]}, r"expected graphs\[0\] to be a \"shape\", got 'x'"),
        ({"graphs": [{"shape": "q1"}]}, r"graphs\[0\]: expected a shape such as"),
        ({"graphs": [{"shape": "--u/q1/s0/u1/l1", "seconds": -1}]}, r"graphs\[0\]\.seconds .* got -1"),
        ({"graphs": [{"shape": "--u/q1/s0/u1/l1", "seconds": 10**400}]}, r"graphs\[0\]\.seconds .* got 1000"),
        ({"graphs": [{"shape": "--u/q1/s0/u1/l1", "bytes": 10**400}]}, r"graphs\[0\]\.bytes .* got 1000"),
        ({"graphs": [{"shape": "--u/q1/s0/u1/l1", "bytes": 1.5}]}, r"graphs\[0\]\.bytes .* got 1\.5"),
        ({"graphs": [{"shape": "--u/q1/s0/u1/l1"}] * 2}, "expected graphs to be each shape once"),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_refused_by_name(
    path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_manifest(changed(path, **fields))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "cannot read a manifest from .*: it is not text"),
        (b"--u/q1/s0/u1/l1\n", "which is not JSON"),
        (b"[1, 2]", "got 'list'"),
        (b'{"a": NaN}', "NaN is no number"),
        (b"", "which is not JSON"),
        (b"[" * 100_000, "which is not JSON"),
    ],
)
def test_something_else_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_manifest(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read a manifest from .*: No such file"):
        read_manifest(tmp_path / "missing.json")
    assert not is_manifest(tmp_path / "missing.json")


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_a_file_that_was_cut_off_is_never_taken_for_a_whole_one(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.json"
    write_manifest(path, MANIFEST)
    whole = path.read_bytes().rstrip()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ValueError, match="manifest"):
        read_manifest(path)


def test_a_table_is_no_manifest(tmp_path: Path) -> None:
    write_table(tmp_path / "table.txt", [record.shape for record in GRAPHS])
    assert not is_manifest(tmp_path / "table.txt")


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, moment, fail)
    with pytest.raises(ValueError, match=r"cannot write the manifest .*: No space left on device"):
        write_manifest(path, Manifest(CONFIGURATION, VERSIONS, GRAPHS[:1]))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot write the manifest .*nowhere"):
        write_manifest(tmp_path / "nowhere" / "manifest.json", MANIFEST)
