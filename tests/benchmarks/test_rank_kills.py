"""The benchmark of killed ranks tells which kills no error has named."""

from __future__ import annotations

import pytest

from benchmarks.rank_kills import KINDS, Kill, unnamed

KILLED, SERVER, STOPPED = (Kill(0.0, what, 1.0, 2.0) for what in KINDS)


@pytest.mark.parametrize(
    ("kill", "told", "is_named"),
    [
        (KILLED, "RankError: rank 1 ended with exit code -9; all ranks have ended", True),
        (KILLED, "RankError: rank 0 hangs: rank 1 waited for it in vain", False),
        (STOPPED, "RankError: rank 1 sent no heartbeat for 5 s", True),
        (STOPPED, "RankError: rank 1 ended with exit code -9", False),
        (SERVER, "", True),
    ],
)
def test_a_kill_without_an_error_that_names_its_rank_is_told(kill: Kill, told: str, is_named: bool) -> None:
    assert unnamed([kill], [told]) == ([] if is_named else [kill.what])
