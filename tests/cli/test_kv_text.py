"""The line of the closing table on what requests held."""

from types import SimpleNamespace
from typing import Any

import pytest

from hpu_duo.cli.text.run import kv_text

MIB = 1 << 20


@pytest.mark.parametrize(
    ("held", "unshared", "full", "expected"),
    [
        (0, 0, 0, "nothing held"),
        (21, 21, 40, "21.0 MiB held, 52.5% of the 40.0 MiB of full attention"),
        (7, 21, 40, "7.00 MiB held; 21.0 MiB without sharing, 52.5% of the 40.0 MiB of full attention"),
        (
            9,
            9,
            1,
            "9.00 MiB held, in whole blocks and rings (texts too short to compare with full attention)",
        ),
    ],
)
def test_sharing_and_streaming_are_told_apart(held: int, unshared: int, full: int, expected: str) -> None:
    stats: Any = SimpleNamespace(
        peak_held_bytes=held * MIB, peak_unshared_bytes=unshared * MIB, peak_full_attention_bytes=full * MIB
    )
    assert kv_text(stats) == expected
