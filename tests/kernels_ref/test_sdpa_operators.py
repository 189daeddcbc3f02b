"""Results of the operators of ``sdpa``, against the shapes that they promise to a compiler."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bias_builders import Window
from kernels_ref import Implementation, unified_attention
from kernels_ref.sdpa import prefill
from tests.kernels_ref.scenario import RowSpec, Scenario, World
from tests.tiers import crossed

pytestmark = pytest.mark.instruction_set


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


@pytest.mark.parametrize(
    ("heads_first", "group", "dtype"),
    crossed([False, True], [1, 3], [torch.float32, torch.bfloat16]),
)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 8, 40])
@pytest.mark.parametrize("window", [Window(0, 1 << 30), Window(3, 9)])
def test_prompts_see_the_part_of_a_text_that_is_theirs(
    dtype: torch.dtype, first: int, window: Window
) -> None:
    """Two rows with 21 and 5 tokens before 7 and 4 new ones; a segment of 16 slots from ``first`` on."""
    torch.manual_seed(first)
    start, num_new, begin = (torch.tensor(x, dtype=torch.int32) for x in ([21, 5], [7, 4], [0, 7]))
    row = torch.tensor([0] * 7 + [1] * 4 + [2] * 2, dtype=torch.int32)
    chunk_row = torch.tensor([1, 0], dtype=torch.int32)
    slot = torch.arange(first, first + 16, dtype=torch.int32)
    position = torch.where(slot < start[[1, 0], None], slot, -1)
    q = torch.randn(13, 2, 3, 32, dtype=dtype) / 4
    k, v = torch.randn(2, 2, 2, 16, 32, dtype=dtype)
    seen = prefill.shared_rings(q, k, v, start, num_new, begin, row, chunk_row, position, *window)
    for token in range(13):
        number = int(row[token])
        is_seen = torch.zeros(16, dtype=torch.bool)
        if number < 2:
            query = int(start[number] + token - begin[number])
            held = position[1 - number]
            is_near = (held < window.sink) | (held > query - window.recent)
            is_seen = (held >= 0) & is_near
        if not is_seen.any():
            assert not seen.sum[token].any()
            continue
        own_k, own_v = (x[1 - number][:, is_seen].double() for x in (k, v))
        weights = (q[token].double() @ own_k.transpose(1, 2)).exp()
        expected = weights @ own_v / weights.sum(-1, keepdim=True)
        atol = 1e-5 if dtype is torch.float32 else 2e-2
        got = seen.attn[token].double() / seen.sum[token][..., None].double()
        torch.testing.assert_close(got, expected, atol=atol, rtol=0)
        total = seen.sum[token].double() * seen.max[token].double().exp()
        torch.testing.assert_close(total.log(), weights.sum(-1).log(), atol=atol, rtol=0)
