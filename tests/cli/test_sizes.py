"""Bytes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.cli.terminal import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("1.5KiB", 1536),
        ("500MB", 500_000_000),
        ("0.5kB", 500),
        ("2TiB", 2 << 40),
        ("77", 77),
        ("77B", 77),
    ],
)
def test_units_of_1000_and_of_1024_are_told_apart(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "4G", "4 K", "GiB", "iB", "7iB", "-1", "1.5", "1e9", "0.3B", "4GiB!", "٤GiB"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size in bytes such as 4GiB"):
        parse_bytes(text)


@given(st.integers(0, 10**15))
def test_a_plain_number_stands_for_itself(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (40 << 20, "40.0 MiB"), (500 << 30, "500 GiB")],
)
def test_sizes_are_shown_with_about_three_digits(num_bytes: int, text: str) -> None:
    assert show_bytes(num_bytes) == text
