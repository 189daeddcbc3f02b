"""Outputs that cannot be written are found out without writing anything."""

import os
from pathlib import Path

import pytest

from hpu_duo.writable import check_directory, check_file


def test_what_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    there = tmp_path / "there.txt"
    there.write_text("old")
    check_file("--out", there)
    check_file("--out", tmp_path / "new.txt")
    check_file("--out", tmp_path / "not" / "yet" / "new.txt", makes_parents=True)
    check_directory("--out", tmp_path)
    check_directory("--out", tmp_path / "not" / "yet")
    assert [path.name for path in tmp_path.iterdir()] == ["there.txt"]
    assert there.read_text() == "old"


def test_a_file_needs_a_directory_unless_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected --out to be a file in a directory .*not does not exist"):
        check_file("--out", tmp_path / "not" / "new.txt")


def test_a_file_is_no_directory_and_a_directory_is_no_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for directory in (file, file / "below"):
        with pytest.raises(ValueError, match=r"expected --out to be a directory .*: Not a directory"):
            check_directory("--out", directory)
    with pytest.raises(ValueError, match=r"expected --out to be a file in .*: Not a directory"):
        check_file("--out", file / "below", makes_parents=True)
    with pytest.raises(ValueError, match=r"got .*, which is something else"):
        check_file("--out", tmp_path)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_a_directory_that_takes_no_files_is_refused_whatever_its_permissions_say() -> None:
    with pytest.raises(
        ValueError, match="expected --out to be a directory that can be written to, got /proc/x"
    ):
        check_directory("--out", Path("/proc/x"))
    with pytest.raises(ValueError, match=r"expected --out to be a file in .* got /proc/x"):
        check_file("--out", Path("/proc/x"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_permissions_are_heeded(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="Permission denied"):
        check_file("--out", tmp_path / "new.txt")
    tmp_path.chmod(0o700)


def test_a_device_is_not_replaced_by_a_file() -> None:
    with pytest.raises(ValueError, match="got /dev/null, which is something else"):
        check_file("--out", Path(os.devnull))
