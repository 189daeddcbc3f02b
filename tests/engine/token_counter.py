"""A kind of row state that the package does not have: tokens that a request has computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from hpu_duo import HPUDuoModel
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.modeling.probe import ROW_KINDS
from kernels_ref import RowKind, RowTensor, Step
from kernels_ref.units import index_dtype


@dataclass(frozen=True)
class TokenCounter(RowKind):
    """Counts, in each of some lanes, the tokens that went through a layer since their request began."""

    num_lanes: int
    name: ClassVar[str] = "token_counter"

    @property
    def tensors(self) -> tuple[RowTensor, ...]:
        return (
            RowTensor("count", (), torch.int32),
            RowTensor("lanes", (self.num_lanes, 2), torch.float32),
        )

    def advance(self, state: tuple[torch.Tensor, ...], step: Step) -> None:
        count, lanes = state
        t, num_rows = step.tensors, len(step.tensors.row_start)
        row = torch.arange(num_rows, dtype=torch.int32, device=count.device)
        row = torch.where(t.row_num_new > 0, row, len(count) - 1).to(index_dtype(count.device))
        for each in (count, lanes):
            shape = (num_rows, *[1] * (each.ndim - 1))
            before = torch.where(t.row_start.view(shape) > 0, each.index_select(0, row), 0)
            each.index_copy_(0, row, (before + t.row_num_new.view(shape)).to(each.dtype))


@contextmanager
def registered(num_lanes: int = 3) -> Iterator[None]:
    """Let each model that is loaded inside count in its odd layers."""
    with patch.dict(ROW_KINDS, token_counter=lambda _, layer: TokenCounter(num_lanes) if layer % 2 else None):
        yield


@contextmanager
def counting(served: HPUDuoModel) -> Iterator[list[int]]:
    """Compare, behind each step inside, the counts of all of its rows with what the scheduler knows.

    Yields:
        Number of rows that were compared, step by step.
    """
    scheduler, store = served.engine.scheduler, served.engine.runner.store
    commit, compared = scheduler.commit, []

    def checked(plan: StepPlan, *args: Any) -> Any:
        for row in plan.rows:
            for of_layer in store.row_tensors[1::2]:
                [(count, lanes)] = of_layer
                assert int(count[row.ring_row]) == row.end, (row, count)
                assert (lanes[row.ring_row].cpu() == row.end).all(), (row, lanes)
        compared.append(len(plan.rows))
        return commit(plan, *args)

    with patch.object(scheduler, "commit", checked):
        yield compared
    assert any(compared)
