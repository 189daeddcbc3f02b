"""Steps in groups of rows that take turns give the tokens of whole steps, in the time of the schedule."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from hpu_duo import HeadPattern
from hpu_duo.engine import executor
from hpu_duo.engine.zigzag import runner
from hpu_duo.modeling.weight_stream import Weights, WeightStream, weight_bytes
from hpu_duo.planning import Format
from hpu_duo.planning.offload import FLEXGEN_T4, Formula, OffloadWork, Placement, ZigZag, offload_model
from hpu_duo.planning.read_model import read_model
from hpu_duo.sampling import SamplingParams
from kernels_ref import PLAIN
from tests.engine.tiny import Tiny, serve, tokens_of
from tests.modeling.families import BASE, prompts_of, save_random

pytestmark = pytest.mark.instruction_set

NUM_LAYERS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=6)
DRAWN = SamplingParams(temperature=1, max_tokens=6, seed=3, logprobs=2)
PROMPTS = prompts_of((13, 5, 22, 9, 31, 7))
PATTERN = HeadPattern(
    np.zeros((NUM_LAYERS, 2), np.float32), sink=2, recent=6, retrieval=np.array([[True, False]] * NUM_LAYERS)
)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny Llama of four layers."""
    path = tmp_path_factory.mktemp("deep")
    return Tiny(path, save_random(LlamaConfig(**{**BASE, "num_hidden_layers": NUM_LAYERS}), path))


def load(deep: Tiny, num_batches: int, num_streamed: int = 0, **options: Any) -> Any:
    """Load with the weights of some layers on the host; prompts come in chunks."""
    gib = max(0.0, num_streamed - 0.5) * weight_bytes(deep.model.model.layers[0]) / 2**30
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 18, "graphs": "eager"}
    return deep.load(**sizes, offload_num_batches=num_batches, cpu_offload_gb=gib, **options)


@pytest.mark.parametrize(
    ("num_batches", "num_streamed", "ahead", "options"),
    [
        (2, 4, 1, {}),
        (3, 3, 1, {"kv_policy": "h2o", "kv_budget": 12}),
        (6, 4, 2, {"pattern": PATTERN, "speculative_config": DRAFTS}),
    ],
)
def test_tokens_are_those_of_whole_steps(
    deep: Tiny, num_batches: int, num_streamed: int, ahead: int, options: dict[str, Any]
) -> None:
    params = [GREEDY, DRAWN] * 3
    whole = serve(load(deep, 1, **options), PROMPTS, params)
    model = load(deep, num_batches, num_streamed, offload_prefetch_step=ahead, **options)
    found = serve(model, PROMPTS, params)
    assert tokens_of(found) == tokens_of(whole)
    for (one,), (other,) in zip(found[1::2], whole[1::2]):
        assert one.logprobs is not None
        assert other.logprobs is not None
        for mine, theirs in zip(one.logprobs, other.logprobs):
            assert list(mine.top) == list(theirs.top)
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


class VirtualLink:
    """A link, and computation beside it, on a clock that only they move."""

    def __init__(self, bytes_per_s: float) -> None:
        self.now = self.num_bytes = 0.0
        self._bytes_per_s, self._free_at = bytes_per_s, 0.0

    def move(self, source: Weights, target: torch.Tensor) -> _VirtualMove:
        assert isinstance(source, torch.Tensor)
        target.copy_(source)
        self.num_bytes += source.nbytes
        self._free_at = max(self._free_at, self.now) + source.nbytes / self._bytes_per_s
        return _VirtualMove(self, self._free_at)


class _VirtualMove:
    def __init__(self, link: VirtualLink, end: float) -> None:
        self._link, self._end = link, end

    def hold(self) -> None:
        self._link.now = max(self._link.now, self._end)


@pytest.mark.parametrize("load_per_compute", [4.0, 0.3])
@pytest.mark.parametrize("num_batches", [1, 3])
def test_time_is_that_of_the_schedule(deep: Tiny, num_batches: int, load_per_compute: float) -> None:
    rows = 2
    model = load(deep, num_batches, NUM_LAYERS)
    executor = model.engine.runner.executor
    stream: WeightStream = executor.model.stream
    link = stream.mover = VirtualLink(stream.num_bytes / NUM_LAYERS / (load_per_compute * rows))

    def compute(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        link.now += args[0].shape[1]  # a second for each token

    for layer in executor.model.model.model.layers:
        layer.mlp.register_forward_pre_hook(compute)
    for prompt in prompts_of((3,) * rows * num_batches):
        model.engine.add_request(prompt, replace(GREEDY, max_tokens=12, ignore_eos=True))
    for _ in range(3):
        model.engine.step()
    before, moved, num_steps = link.now, link.num_bytes, 4
    for _ in range(num_steps):
        model.engine.step()
    sizes = replace(
        offload_model(read_model(deep.path), Format.BF16, PLAIN), layer_bytes=stream.num_bytes / NUM_LAYERS
    )
    machine = replace(
        FLEXGEN_T4,
        up=stream.num_bytes / NUM_LAYERS / (load_per_compute * rows),
        decode_matrix=2 * sizes.layer_params,
        decode_attention=float("inf"),
        loads_first=False,
    )
    formula = Formula(sizes, OffloadWork(3, num_steps + 1), machine, rows, num_batches, False)
    placement = Placement(0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    assert link.now - before == pytest.approx(ZigZag(formula, placement).run().decode_s, rel=0.01)
    assert link.num_bytes - moved == num_steps * stream.num_bytes


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that operators allocate, while they live.

    Args:
        counts: bytes that live, and the most that did; shared by the modes of several threads.
    """

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {each.untyped_storage()._cdata for each in tensors_in((args, kwargs))}
        found = func(*args, **kwargs)
        new = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors_in(found)}
        for key in new.keys() - given:
            self.counts[0] += new[key].nbytes()
            self.counts[1] = max(self.counts)
            weakref.finalize(new[key], self.gone, new[key].nbytes())
        return found

    def gone(self, num_bytes: int) -> None:
        self.counts[0] -= num_bytes


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def test_the_peak_of_a_step_is_within_the_planned_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside weights and stores, whose sizes are exact; a step that is not cut needs more than that."""
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(**{**BASE, **wide, "head_dim": 64, "num_hidden_layers": NUM_LAYERS})
    tiny, rows, prompt, num_groups = Tiny(tmp_path, save_random(config, tmp_path)), 4, 48, 4
    counts, sizes = [0, 0], offload_model(read_model(tmp_path), Format.BF16, PLAIN)

    def counted(step_of: Any) -> Any:
        def make(*args: Any) -> Any:
            step = step_of(*args)

            def run(*inputs: Any) -> Any:
                with Live(counts):
                    return step(*inputs)

            return run

        return make

    for module in (runner, executor):
        monkeypatch.setattr(module, "bucket_step", counted(module.bucket_step))
    peaks = {}
    for num_batches in (1, num_groups):
        most = {"max_num_seqs": rows * num_groups, "max_num_batched_tokens": rows * num_groups * prompt}
        model = tiny.load(**most, graphs="eager", offload_num_batches=num_batches, attention="sdpa")
        for each in prompts_of((prompt,) * rows * num_groups):
            model.engine.add_request(each, replace(GREEDY, ignore_eos=True))
        found = peaks[num_batches] = []
        for _ in range(2):  # prompts, and a decode
            before = counts[1] = counts[0]
            model.engine.step()
            found.append(counts[1] - before)
    formula = Formula(sizes, OffloadWork(prompt, 6), FLEXGEN_T4, rows, num_groups, False)
    forms = formula.memory()["device"]
    placed = formula.num_rows * formula.work.stored_end * sizes.kv_bytes * NUM_LAYERS
    placed += sizes.resident_bytes + NUM_LAYERS * sizes.layer_bytes
    on_device = [*Placement(1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0), 1.0]
    # Planned in 16 bits, and computed in 32.
    planned = [2 * (float(form @ on_device) - placed) for form in forms]
    for measured, limit in zip(peaks[num_groups], planned):
        assert 0 < measured <= limit
    assert peaks[1][0] > planned[0]


def test_a_failed_layer_ends_the_step_of_all_groups(deep: Tiny) -> None:
    model = load(deep, 3)
    layers = model.engine.runner.executor.model.model.model.layers
    calls: list[int] = []

    def fail(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        calls.append(len(calls))
        if len(calls) == 2:  # of the second group, while the others wait in front of a layer
            raise RuntimeError("this layer is broken")

    hook = layers[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="this layer is broken"):
        model.engine.generate(prompts_of((3,) * 6), GREEDY)
    hook.remove()
    assert not model.engine.has_unfinished
    assert tokens_of(serve(model, PROMPTS, GREEDY)) == tokens_of(serve(load(deep, 1), PROMPTS, GREEDY))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graphs": "replay"}, "got graphs='replay'"),
        ({"record_steps": "steps.bin"}, "got record_steps"),
        ({"graphs": "eager", "fail_on_recompile": True}, "got fail_on_recompile"),
        ({"speculative_config": {"method": "duo", "num_speculative_tokens": 2}}, "got a model that drafts"),
        ({"tensor_parallel_size": 2}, "got tensor_parallel_size=2"),
        ({"offload_num_batches": 0}, "offload_num_batches"),
    ],
)
def test_what_groups_do_not_have_is_refused(deep: Tiny, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deep.load(**{"offload_num_batches": 2, **options})
