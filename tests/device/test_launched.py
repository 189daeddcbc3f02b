"""The place of a process that torchrun has started."""

from __future__ import annotations

import pytest

from hpu_duo.device.ranks import Launched

TOLD = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "host-0",
    "MASTER_PORT": "29500",
}


def test_ranks_are_read_from_the_variables_of_torchrun() -> None:
    assert Launched.of(TOLD, 16) == Launched(9, 16, 1, 8, "host-0", 29500)
    more = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert Launched.of({**TOLD, **more}, 16) == Launched(
        9, 16, 1, 8, "host-0", 29500, has_store=True, attempt=2
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"RANK": "", "MASTER_ADDR": ""}, "missing: RANK, MASTER_ADDR$"),
        ({"LOCAL_RANK": "one"}, "^expected LOCAL_RANK to be a number, got 'one'$"),
        ({"WORLD_SIZE": "8"}, "start tensor_parallel_size=16 ranks, got WORLD_SIZE=8$"),
    ],
)
def test_what_torchrun_has_not_set_so_is_refused(changes: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Launched.of({**TOLD, **changes}, 16)
