"""Ranks whose exchanges give wrong values do not start, and the error names rank and exchange."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpu_duo.device import Member, run_processes
from hpu_duo.device.collectives import ExchangeTrial
from hpu_duo.device.ranks import RankError, Ranks, joined
from hpu_duo.startup.device_side import Place
from hpu_duo.startup.sharding import build_share
from tests.modeling.families import Zoo
from tests.ranks.work import Case

OPERATORS = torch.ops._c10d_functional
BROKEN = {
    "all_reduce": OPERATORS.all_reduce.default,
    "all_gather": OPERATORS.all_gather_into_tensor.default,
    "all_to_all": OPERATORS.all_to_all_single.default,
    "broadcast": torch.ops.c10d.broadcast_.default,
}


class Broken(TorchDispatchMode):
    """Changes one of the values that an exchange leaves on this rank, in one type.

    Attributes:
        count: exchanges so far.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.operator, self.dtype, self.count = BROKEN[name], dtype, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is BROKEN["broadcast"] and func is self.operator:
            [tensors, work] = found
            work.wait()
            tensors[0][100] += 1
        elif func is self.operator and found.dtype == self.dtype:
            found = OPERATORS.wait_tensor(found)
            found.view(-1)[100] += 1
        return found


Fault = tuple[str, str, torch.dtype]
"""Keeping of retrieval heads, name of the broken exchange, and type of its values."""


def start_with(member: Member, case: Case, faults: list[Fault]) -> list[str]:
    """Start to build shares, with one fault on the last rank at a time; returns the errors of this rank."""
    told = []
    place = Place.of(case.config(member.size), member.rank)
    store = member.store()
    with joined(Ranks(member.rank, member.size), "gloo", store, place.device, 60.0) as membership:
        for way, name, dtype in faults:
            config = replace(case, parallel={"retrieval_parallel": way}).config(member.size)
            is_last = member.rank == member.size - 1
            try:
                with Broken(name, dtype) if is_last else nullcontext():
                    build_share(config, place, membership, None)
            except RankError as error:
                told.append(str(error))
            else:
                told.append("none")
    return told


@pytest.mark.usefixtures("forked_ranks")
def test_a_wrong_exchange_is_named_with_its_rank_before_weights_are_read(zoo: Zoo) -> None:
    case = Case(zoo.load("llama")[1], (), (), model={"dtype": "bfloat16"})
    types = (torch.float32, torch.bfloat16)
    faults = [
        ("context", name, dtype) for name in ("all_reduce", "all_gather", "all_to_all") for dtype in types
    ]
    faults += [("heads", "broadcast", torch.uint8), ("heads", "all_gather", torch.bfloat16)]
    # By heads nobody exchanges all to all.
    harmless = ("heads", "all_to_all", torch.float32)
    *told, last = run_processes(start_with, (case, [*faults, harmless]), [{}] * 2, 120)[0]
    assert last == "none"
    for (_, name, dtype), error in zip(faults, told):
        which = "broadcast of rank 0" if name == "broadcast" else f"{name} in {str(dtype)[6:]}"
        expected = f"expected ranks to exchange data correctly, got a fault on rank 1: {which} left 1 of "
        assert error.startswith(expected)
        assert "hpu-duo doctor --collectives 2" in error


def test_an_exchange_that_fails_is_named() -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("no port is up")

    with pytest.raises(RuntimeError, match=r"^all_reduce in float32 failed: no port is up$"):
        ExchangeTrial("all_reduce in float32", fail, torch.zeros(1)).fault()
