"""Results of the operators of ``sdpa``, against the shapes that they promise to a compiler."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bias_builders import Window
from kernels_ref import Implementation, unified_attention
from tests.kernels_ref.scenario import RowSpec, Scenario, World


def layout(tensor: torch.Tensor) -> tuple[torch.dtype, list[tuple[int, int]]]:
    """Size and stride of each dimension; a single entry may have any stride."""
    return tensor.dtype, [(n, by if n > 1 else 0) for n, by in zip(tensor.shape, tensor.stride())]


class Promises(TorchDispatchMode):
    """Checks each of our operators against its fake: size, stride and dtype of all outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func.namespace == "hpu_duo_kernels" and func._schema.returns:
            self.seen.add(func._schema.name.partition("::")[2])
            with FakeTensorMode() as fake:
                inputs = [fake.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
                promised = func(*inputs, **(kwargs or {}))
            assert [layout(x) for x in outputs] == [layout(x) for x in promised], func
        return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("heads_first", [False, True])
def test_outputs_are_laid_out_as_promised(group: int, dtype: torch.dtype, heads_first: bool) -> None:
    window = Window(2, 6)
    mixes = [
        (RowSpec(0, 33),),
        (RowSpec(11, 9), RowSpec(20, 1), RowSpec(0, 4)),
        (RowSpec(20, 1), RowSpec(13, 1)),
    ]
    with Promises() as promises:
        for rows in mixes:
            for pad in ((0, 0, 0, 0), (3, 1, 2, 1)):
                world = World(Scenario(rows, 4, window, 2, 1, group, 8, pad, False, 5), dtype)
                q, k, v, step = world.inputs()
                if heads_first:
                    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
                unified_attention(q, k, v, world.cache, step, world.spec(Implementation.SDPA))
    assert promises.seen >= {"causal", "shared_blocks", "shared_rings", "unique_blocks"}
