"""The place of a process that a launcher such as torchrun has started among all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

TORCHRUN = "torchrun"
"""Name of the launcher in ``ParallelConfig``."""
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launched:
    """One rank, by torch's environment variables of a launcher.

    Attributes:
        rank, size: number of this rank, and of ranks on all machines.
        local_rank, local_size: the same on this machine.
        host, port: of the rendezvous store, and of rank 0's machine.
        has_store: whether the launcher runs that store; otherwise rank 0 does.
        attempt: how often the launcher has started all ranks anew.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    has_store: bool = False
    attempt: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str], size: int) -> Launched:
        """Read the variables of a process.

        Args:
            size: configured number of ranks.

        Raises:
            ValueError: variables are missing or no numbers, or there is another number of ranks.
        """
        missing = [name for name in _NEEDED if not environment.get(name)]
        if missing:
            raise ValueError(
                "rank_launcher='torchrun' needs the variables that torchrun sets: expected "
                f"{', '.join(_NEEDED)}, missing: {', '.join(missing)}"
            )
        numbers = {name: environment[name] for name in _NEEDED if name != "MASTER_ADDR"}
        numbers["TORCHELASTIC_RESTART_COUNT"] = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        for name, text in numbers.items():
            if not (text.isascii() and text.isdigit()):
                raise ValueError(f"expected {name} to be a number, got {text!r}")
        found = cls(
            rank=int(numbers["RANK"]),
            size=int(numbers["WORLD_SIZE"]),
            local_rank=int(numbers["LOCAL_RANK"]),
            local_size=int(numbers["LOCAL_WORLD_SIZE"]),
            host=environment["MASTER_ADDR"],
            port=int(numbers["MASTER_PORT"]),
            has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
            attempt=int(numbers["TORCHELASTIC_RESTART_COUNT"]),
        )
        if found.size != size:
            raise ValueError(
                f"expected torchrun to start tensor_parallel_size={size} ranks, got WORLD_SIZE={found.size}"
            )
        return found

    @classmethod
    def here(cls, size: int) -> Launched:
        """Read the variables of this process; see ``of``."""
        return cls.of(os.environ, size)

    def take_card(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Set the environment variables of this process, before it acquires a device."""
        os.environ.update(environments[self.local_rank])

    def store(self, timeout_s: float) -> dist.Store:
        """Return the rendezvous store of all ranks, separate for each attempt.

        Args:
            timeout_s: most seconds to wait for it.
        """
        is_master = self.rank == 0 and not self.has_store
        wait = timedelta(seconds=timeout_s)
        store = dist.TCPStore(self.host, self.port, is_master=is_master, timeout=wait, wait_for_workers=False)
        return dist.PrefixStore(f"hpu-duo/{self.attempt}", store)


def follows_another() -> bool:
    """Whether a launcher has started this process as another rank than the first."""
    return os.environ.get("RANK", "0") != "0"
