"""The operations of the device part, checked for those that a graph capture does not allow."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpu_duo.sampling import PenaltyState, SamplingBatch, SamplingParams, SamplingRow, sample_tokens

torch.set_num_threads(1)
V = 64
ALL_PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=40),
    SamplingParams(),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.9, min_p=0.1, logprobs=3),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.2, frequency_penalty=0.1),
    SamplingParams(logit_bias={3: 1.0}, min_tokens=5, stop_token_ids=[1]),
]
# These return int64 whatever is asked; the sampler narrows or drops that at once.
INT64_SOURCES = {"aten::argmax", "aten::sort", "aten::topk"}
NARROWING = {"aten::_to_copy", "aten::slice", "aten::alias"}
DATA_DEPENDENT = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::index",
    "aten::index_put_",
    "aten::_unique2",
    "aten::multinomial",
}


class Recorder(TorchDispatchMode):
    """Collects (operation, input dtypes, output shapes and dtypes)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        outputs = [(tuple(x.shape), x.dtype) for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.calls.append((func.name().split(".")[0], tuple(inputs), tuple(outputs)))
        return result


def _batch(params: SamplingParams, seed: int, output_ids: list[int]) -> SamplingBatch:
    history = PenaltyState.from_token_ids(params, [1, 2], output_ids)
    row = SamplingRow(params, seed, len(output_ids), history, (0,))
    return SamplingBatch.build([row, None, row], V)


def _record(batch: SamplingBatch, logits: torch.Tensor) -> list:
    floats = torch.tensor(batch.floats)
    with Recorder() as recorder:
        sample_tokens(logits, floats, batch.route)
    return recorder.calls


@pytest.mark.parametrize("params", ALL_PARAMS, ids=repr)
def test_no_operation_depends_on_data_or_spreads_int64(params: SamplingParams) -> None:
    calls = _record(_batch(params, 1, [4]), torch.randn(3, V))
    assert not {name for name, _, _ in calls} & DATA_DEPENDENT
    for name, inputs, outputs in calls:
        assert torch.int64 not in inputs or name in NARROWING, name
        has_int64 = any(dtype == torch.int64 for _, dtype in outputs)
        assert not has_int64 or name in INT64_SOURCES | NARROWING, name


@pytest.mark.parametrize("params", ALL_PARAMS, ids=repr)
def test_equal_routes_run_the_same_operations_on_the_same_shapes(params: SamplingParams) -> None:
    first, second = _batch(params, 1, [4]), _batch(params, 999, [5, 6, 7])
    assert first.route == second.route
    assert _record(first, torch.randn(3, V)) == _record(second, torch.randn(3, V) * 50)


@pytest.mark.parametrize("params", ALL_PARAMS, ids=repr)
def test_the_device_part_is_captured_whole(params: SamplingParams) -> None:
    batch = _batch(params, 1, [4])
    arguments = (torch.randn(3, V), torch.tensor(batch.floats), batch.route)
    captured = torch.compile(sample_tokens, backend="eager", fullgraph=True, dynamic=False)
    assert captured(*arguments).token_ids.tolist() == sample_tokens(*arguments).token_ids.tolist()


def test_a_plain_greedy_batch_is_one_argmax() -> None:
    # Of a dtype for which there is no kernel of ours on any CPU.
    calls = _record(_batch(ALL_PARAMS[0], 1, []), torch.randn(3, V).half())
    computing = [name for name, _, outputs in calls if outputs and outputs[0][0] == (3, V)]
    assert computing == []
    assert [name for name, _, _ in calls if name == "aten::argmax"] == ["aten::argmax"]
