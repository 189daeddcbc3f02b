"""Exchange between the cards of the machine."""

from __future__ import annotations

import torch

from hpu_duo.device.collectives import check_collectives
from hpu_duo.lab.selftest.finding import Notes
from hpu_duo.lab.selftest.subject import Subject

_PROCESSES_WITHOUT_CARDS = 2


def exchange(subject: Subject, notes: Notes) -> None:
    """Sum and send tensors between one process for each card, by the device's own backend.

    Devices that are no cards, such as a CPU, are shared by two processes.
    """
    size = subject.num_cards or _num_cards(subject.kind)
    if size < 2:
        notes.fact("cards", f"{size}: there is nobody to exchange with")
        return
    notes.begin(f"{size} processes")
    result = check_collectives(subject.kind, size)
    notes.check(
        f"{result.backend} between {size} processes",
        True,
        "broadcasts, sums, gathers and exchanges all to all are right; "
        f"{result.num_bytes >> 20} MiB summed in "
        f"{result.seconds * 1e3:.1f} ms, {result.bus_bandwidth / 1e9:.1f} GB/s on the bus",
        seconds=result.seconds,
        bus_bytes_per_s=result.bus_bandwidth,
        num_bytes=result.num_bytes,
    )


def _num_cards(kind: str) -> int:
    if kind == "hpu":
        from hpu_duo.device import habana

        return habana.num_devices()
    return torch.cuda.device_count() if kind == "cuda" else _PROCESSES_WITHOUT_CARDS
