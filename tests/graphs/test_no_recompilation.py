"""Buckets of HPU in compile mode, whose regions compile nothing after the first run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphs import BatchShape, RecompileError
from graphs.backends.hpu import HpuCompileBackend, no_recompilation
from tests.vendor import choose_mode

SHAPE = BatchShape.parse("c--/q4/s0/u0/l1")
WIDER = BatchShape.parse("c--/q6/s0/u0/l1")


def grow(x: Tensor, by: Tensor) -> Tensor:
    return x + by


@torch.inference_mode()
@pytest.mark.parametrize("guards", [False, True])
def test_after_its_first_run_a_bucket_compiles_nothing_unless_guards_are_asked_for(
    vendor: pytest.MonkeyPatch, guards: bool
) -> None:
    choose_mode(vendor, is_lazy=False)
    backend = HpuCompileBackend(guards)
    region, sizes = backend.region(SHAPE, "grow", grow), iter([3, 3, 4, 4, 3])
    step = backend.capture(lambda inputs: region(torch.ones(next(sizes)), torch.ones(1)), SHAPE)
    assert step({}).tolist() == step({}).tolist() == [2, 2, 2]
    if guards:
        assert step({}).tolist() == step({}).tolist() == [2, 2, 2, 2]
        return
    with pytest.raises(RecompileError, match="after warm-up, got c--/q4/s0/u0/l1: Recompilation") as raised:
        step({})
    assert len(raised.value.findings) == 1
    assert step({}).tolist() == [2, 2, 2, 2], "who tries again is served"
    assert step({}).tolist() == [2, 2, 2]
    # The stance ended with the step: others compile as usual.
    other = backend.region(WIDER, "grow", grow)
    assert other(torch.ones(2), torch.ones(1)).tolist() == [2, 2]
    assert torch._dynamo.eval_frame._stance.skip_guard_eval_unsafe is False


def test_other_errors_pass_through_where_nothing_may_be_compiled() -> None:
    with pytest.raises(RuntimeError, match="something else"), no_recompilation("a step"):
        raise RuntimeError("something else")
