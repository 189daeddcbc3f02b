"""Helpers that every picture needs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hpu_duo.extras import install_command
from hpu_duo.writable import check_file


def check_matplotlib(what: str) -> None:
    """Raise ValueError unless matplotlib is installed, naming what needs it."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"{what} needs matplotlib, which is not installed: {install_command('plot')}")


def check_drawing(file: Path, option: str = "--png", suffixes: tuple[str, ...] = (".png",)) -> None:
    """Raise ValueError unless a picture can be made and written there.

    Args:
        option: that names the file.
        suffixes: of formats that can be asked for.
    """
    check_matplotlib(option)
    if file.suffix.lower() not in suffixes:
        raise ValueError(f"expected a file name that ends in {' or '.join(suffixes)}, got {str(file)!r}")
    check_file(option, file)
