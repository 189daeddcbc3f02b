"""Files that are replaced whole, or stay as they were."""

from pathlib import Path

import pytest

from graphs.atomic_file import replace_file


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    for text in ("one\n", "zwei: ä\n"):
        replace_file(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_text_that_cannot_be_written_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    path.mkdir()
    (path / "kept").touch()
    with pytest.raises(OSError):
        replace_file(path, "new")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match=r"absent/table\.txt'"):
        replace_file(tmp_path / "absent" / "table.txt", "new")
