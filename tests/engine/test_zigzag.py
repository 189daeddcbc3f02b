"""Steps in groups of rows that take turns give the tokens of whole steps, in the time of the schedule."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from hpu_duo import HeadPattern
from hpu_duo.engine.on_host.attention import HostAttention, planned_bytes
from hpu_duo.engine.on_host.tiles import GroupAhead
from hpu_duo.engine.on_host.worker import WorkerThread
from hpu_duo.engine.zigzag import runner
from hpu_duo.modeling.weight_stream import ThreadMover, Weights, WeightStream, weight_bytes
from hpu_duo.planning import Format
from hpu_duo.planning.offload import (
    BLOCK_SIZE,
    FLEXGEN_T4,
    Formula,
    OffloadWork,
    Placement,
    ZigZag,
    offload_model,
)
from hpu_duo.planning.read_model import read_model
from hpu_duo.sampling import SamplingParams
from kernels_ref import PLAIN
from tests.engine.tiny import MAX_LEN, Tiny, serve, tokens_of
from tests.modeling.families import BASE, BLOCK, prompts_of, save_random

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
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 18, "graphs": "eager", **options}
    return deep.load(**sizes, offload_num_batches=num_batches, cpu_offload_gb=gib)


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


LONG = prompts_of((76, 5, 81, 9, 70, 33))
NUM_ON_DEVICE = 21
"""The fewest blocks that steps of 18 tokens and 6 rows need; the prompts fill 38."""


def load_beside_host(
    deep: Tiny, num_batches: int, mode: str, weights: str = "100,0", acts: str = "100,0", **options: Any
) -> tuple[Any, HostAttention]:
    """Load with half of the blocks of keys and values on the host."""
    ignored = ("offload_prefetch_step", "offload_disk")
    own = {name: value for name, value in options.items() if name not in ignored}
    block_bytes = load(deep, 1, **own).engine.runner.store.plan.block_bytes
    model = load(
        deep,
        num_batches,
        **{"offload_policy": f"{weights},50,50,{acts}", "cpu_attention_mode": mode, **options},
        cpu_attention=(NUM_ON_DEVICE + 0.01) * block_bytes / 2**30,
        enable_prefix_caching=False,
    )
    assert model.engine.scheduler.limits.num_blocks == NUM_ON_DEVICE
    host = model.engine.runner.host
    assert isinstance(host, HostAttention)
    return model, host


@pytest.mark.parametrize(
    ("num_batches", "mode", "options"),
    [(3, "move", {}), (2, "attend", {"pattern": PATTERN, "speculative_config": DRAFTS})],
)
def test_tokens_are_those_of_whole_steps_with_blocks_on_the_host(
    deep: Tiny, num_batches: int, mode: str, options: dict[str, Any]
) -> None:
    params = [GREEDY, DRAWN] * 3
    whole = tokens_of(serve(load(deep, 1, **options), LONG, params))
    model, host = load_beside_host(deep, num_batches, mode, "25,75", **options)
    assert tokens_of(serve(model, LONG, params)) == whole
    assert host.traffic.blocks > 0 < host.traffic.contexts  # behind chunks of prompts too
    assert (host.traffic.triples > 0) is (mode == "attend")
    assert any("tokens of running requests" in note for note in model.stats().notes)


@pytest.mark.parametrize(
    ("num_batches", "policy", "away", "options"),
    [(6, "100,0,100,0,0,100", {*range(6)}, {}), (4, "0,100,100,0,50,50", {1, 3}, {"pattern": PATTERN})],
)
def test_hidden_states_of_waiting_groups_take_no_memory_of_the_device(
    deep: Tiny, num_batches: int, policy: str, away: set[int], options: dict[str, Any]
) -> None:
    """But for those on their way; tokens are those of whole steps."""
    params = [GREEDY, DRAWN] * 3
    whole = tokens_of(serve(load(deep, 1, **options), PROMPTS, params))
    model = load(deep, num_batches, offload_policy=policy, **options)
    waiting = model.engine.runner.turns.waiting
    made, num_there = list[weakref.ref[torch.Tensor]](), set[int]()

    def compute(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        tensors = [each for ref in made if (each := ref()) is not None]
        num_there.add(sum(each.untyped_storage().nbytes() > 0 for each in tensors))

    layers = model.engine.runner.executor.model.model.model.layers
    for layer in layers[:-1]:
        layer.register_forward_hook(lambda _, args, output: made.append(weakref.ref(output)))
    for layer in layers:
        layer.mlp.register_forward_pre_hook(compute)
    assert tokens_of(serve(model, PROMPTS, params)) == whole
    assert waiting.num_bytes > 0
    # The group that computes, the one before, and the next one; and those that do not leave.
    assert max(num_there) <= 3 + num_batches - len(away)
    note = f"hidden states of {len(away)} of {num_batches} groups lie on the host"
    assert note in " ".join(model.stats().notes)


@pytest.mark.parametrize("copy", ["_up", "_down"])
def test_a_failed_copy_of_hidden_states_leaves_nothing_behind(deep: Tiny, copy: str) -> None:
    params = [GREEDY, DRAWN] * 3
    whole = tokens_of(serve(load(deep, 1), PROMPTS, params))
    model = load(deep, 6, offload_policy="100,0,100,0,0,100")
    mover = getattr(model.engine.runner.turns.waiting, copy)
    copies, do = list[int](), mover._copy

    def fail(*given: Any) -> None:
        copies.append(1)
        if len(copies) == 3:
            raise RuntimeError("copy failed")
        do(*given)

    mover._copy = fail
    with pytest.raises(RuntimeError, match="copy failed"):
        serve(model, PROMPTS, params)
    assert tokens_of(serve(model, PROMPTS, params)) == whole


@pytest.mark.parametrize(
    ("num_batches", "policy", "rows"),
    [(4, "0,100,100,0,0,100", 1), (2, "100,0,100,0,75,25", 6), (1, "0,100,100,0,0,100", 6)],
)
def test_hidden_states_on_the_host_need_groups_that_wait(
    deep: Tiny, num_batches: int, policy: str, rows: int
) -> None:
    with pytest.raises(ValueError, match="expected act_host of one group or more"):
        load(deep, num_batches, offload_policy=policy, max_num_seqs=rows)


ALIKE = (
    {},
    {"pattern": PATTERN},
    {"pattern": PATTERN, "speculative_config": DRAFTS},
    {"kv_policy": "h2o", "kv_budget": 12},
    {"kv_cache_dtype": "int8_per_token_head", "attention": "sdpa"},
    {"quantization": "int4"},
)
"""Formats, patterns and budgets, with which tokens do not depend on placement and groups."""


@pytest.mark.slow
@pytest.mark.parametrize("num_cases", [16, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_tokens_are_those_of_whole_steps_for_any_groups_prefetch_placement_and_link(
    deep: Tiny, tmp_path: Path, num_cases: int
) -> None:
    params, whole = [GREEDY, DRAWN] * 3, dict[tuple[int, bool], list[list[list[int]]]]()
    modes = st.sampled_from([None, "attend", "move", "auto"])
    homes = st.lists(st.sampled_from(["device", "host", "disk"]), min_size=NUM_LAYERS, max_size=NUM_LAYERS)
    speeds = st.sampled_from([None, 2e7, 2e6])

    @settings(max_examples=num_cases, deadline=None, derandomize=True)
    @given(
        *(st.integers(1, 6), st.integers(1, 4), homes, modes, st.sampled_from([100, 50, 0]), speeds),
        st.integers(0, len(ALIKE) - 1),
    )
    def check(
        num_batches: int,
        ahead: int,
        homes: list[str],
        mode: str | None,
        of_act: int,
        speed: float | None,
        number: int,
    ) -> None:
        options = ALIKE[number]
        if "kv_budget" in options:
            mode = None  # refused
        prompts = PROMPTS if mode is None else LONG
        if (number, mode is None) not in whole:
            whole[number, mode is None] = tokens_of(serve(load(deep, 1, **options), prompts, params))
        shares = [100 * homes.count(each) / NUM_LAYERS for each in ("device", "host")]
        weights = f"{shares[0]:g},{shares[1]:g}"
        acts = f"{of_act},{100 - of_act}" if num_batches > 1 else "100,0"
        placed = {
            "offload_prefetch_step": ahead,
            "offload_disk": tmp_path if "disk" in homes else None,
            **options,
        }
        if mode is None:
            model = load(deep, num_batches, offload_policy=f"{weights},100,0,{acts}", **placed)
        else:
            model, host = load_beside_host(deep, num_batches, mode, weights, acts, **placed)
            host.worker = WorkerThread(speed)
        stream = model.engine.runner.executor.model.stream
        assert (stream is None) is (set(homes) == {"device"})
        if stream is not None:
            stream.mover = ThreadMover(speed)
        assert tokens_of(serve(model, prompts, params)) == whole[number, mode is None]

    check()


class VirtualLink:
    """A link, and computation beside it, on a clock that only they move."""

    def __init__(self, bytes_per_s: float) -> None:
        self.now = self.num_bytes = 0.0
        self.bytes_per_s, self._free_at, self.clock = bytes_per_s, 0.0, self

    def move(self, source: Weights, target: torch.Tensor) -> _VirtualMove:
        assert isinstance(source, torch.Tensor)
        target.copy_(source)
        return self.take(source.nbytes)

    def take(self, num_bytes: int) -> _VirtualMove:
        self.num_bytes += num_bytes
        self._free_at = max(self._free_at, self.clock.now) + num_bytes / self.bytes_per_s
        return _VirtualMove(self.clock, self._free_at)


class VirtualHost:
    """Work of the host on the same clock.

    Blocks that it copies to the device take their turn on the same link; queries and triples take no time.
    """

    def __init__(self, link: VirtualLink, bytes_per_s: float) -> None:
        self._link, self._bytes_per_s = link, bytes_per_s
        self._moves, self._reading = list[_VirtualMove](), 0.0

    def begin(self, work: Callable[[], Any]) -> Callable[[], Any]:
        self._moves, self._reading = [], 0.0
        result, moves, reading = work(), self._moves, self._reading

        def join() -> Any:
            for each in moves:
                each.hold()
            self._link.now += reading
            return result

        return join

    def move(self, num_bytes: int, copy: Callable[[], Any]) -> Any:
        result = copy()
        if result is None:
            self._moves.append(self._link.take(num_bytes))
        return result

    def host_reads(self, num_bytes: int) -> None:
        self._reading += num_bytes / self._bytes_per_s

    def device_reads(self, num_bytes: int) -> None:
        """Takes no time."""

    def drain(self) -> None:
        """Nothing runs on."""


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


@pytest.mark.parametrize(
    ("mode", "load_per_compute"), [("move", 4.0), ("move", 0.3), ("attend", 30.0), ("attend", 0.3)]
)
def test_time_with_blocks_on_the_host_is_that_of_the_schedule(
    deep: Tiny, mode: str, load_per_compute: float
) -> None:
    """The link brings weights and contexts, or the host attends, beside a second for each token."""
    rows, num_batches, num_steps = 2, 3, 8
    num_rows = rows * num_batches
    model, host = load_beside_host(deep, num_batches, mode, "0,100")
    executor, requests = model.engine.runner.executor, model.engine.scheduler._running
    for prompt in prompts_of((24,) * num_rows):
        model.engine.add_request(prompt, replace(GREEDY, max_tokens=24, ignore_eos=True))
    num_prefills = 24 * num_rows // 18 + 2
    for _ in range(num_prefills):
        model.engine.step()
    assert sum(len(each.tokens) > 24 for each in requests) == num_rows
    sizes = replace(
        offload_model(read_model(deep.path), Format.BF16, PLAIN),
        layer_bytes=executor.model.stream.num_bytes / NUM_LAYERS,
        kv_bytes=host.num_bytes / (host.num_blocks + 1) / NUM_LAYERS / BLOCK,
    )
    tokens_there = sum(len(each.host_blocks) for each in requests) * BLOCK
    assert tokens_there > 0
    ahead = GroupAhead(num_batches, rows, MAX_LEN // BLOCK) if mode == "move" else None
    planned = planned_bytes(model.engine.runner.store.plan, host.num_blocks, is_apart=False, ahead=ahead)
    assert planned == (host.num_bytes, host.staging_bytes)
    loaded = sizes.layer_bytes + tokens_there * sizes.kv_bytes * (mode == "move")
    link = VirtualLink(loaded / (load_per_compute * num_rows))
    read_rate = tokens_there * sizes.kv_bytes / (2 * num_rows)  # as long as the others together, at first
    executor.model.stream.mover, host.worker = link, VirtualHost(link, read_rate)

    def compute(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        link.now += args[0].shape[1]

    for layer in executor.model.model.model.layers:
        layer.mlp.register_forward_pre_hook(compute)
    model.engine.step()
    # Blocks leave meanwhile, and each step is priced with those that are there.
    work, expected, took = OffloadWork(24, 2), 0.0, 0.0
    machine = replace(
        FLEXGEN_T4,
        up=link.bytes_per_s,
        decode_matrix=2 * sizes.layer_params,
        decode_attention=math.inf,
        host_attention=read_rate * sizes.pair_ops / sizes.kv_bytes,
        host_fit=(0.0, 0.0, 0.0),
        loads_first=False,
        flexgen_memory=False,
    )
    formula = Formula(sizes, work, machine, rows, num_batches, mode == "attend")
    for _ in range(num_steps):
        began = link.now
        model.engine.step()
        took += link.now - began
        tokens = sum(len(each.host_blocks) for each in requests) * BLOCK
        share = tokens / num_rows / work.context(1.0)
        placement = Placement(0.0, 1.0, 0.0, 1 - share, share, 0.0, 1.0, 0.0, 0.0)
        expected += ZigZag(formula, placement).run().decode_s
    assert took == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("up_per_compute", "down_per_compute"), [(4.0, 0.3), (0.5, 0.3)])
def test_time_with_hidden_states_on_the_host_is_that_of_the_schedule(
    deep: Tiny, up_per_compute: float, down_per_compute: float
) -> None:
    """Weights and hidden states of two of three groups come up; these hidden states go down too."""
    rows, num_batches, num_steps = 2, 3, 4
    share, num_rows = 2 / 3, rows * num_batches
    model = load(deep, num_batches, offload_policy=f"0,100,100,0,{100 - 100 * share},{100 * share}")
    runner = model.engine.runner
    stream, waiting = runner.executor.model.stream, runner.turns.waiting
    sizes = offload_model(read_model(deep.path), Format.BF16, PLAIN)
    # In float32, an element has the bytes of two of 16 bits.
    sizes = replace(sizes, layer_bytes=stream.num_bytes / NUM_LAYERS, hidden_size=2 * sizes.hidden_size)
    moved = share * num_rows * sizes.act_bytes
    up = VirtualLink((sizes.layer_bytes + moved) / (up_per_compute * num_rows))
    down = VirtualLink(moved / (down_per_compute * num_rows))
    down.clock = up
    stream.mover = waiting._up = up
    waiting._down = down

    def compute(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        up.now += args[0].shape[1]

    for layer in runner.executor.model.model.model.layers:
        layer.mlp.register_forward_pre_hook(compute)
    for prompt in prompts_of((3,) * num_rows):
        model.engine.add_request(prompt, replace(GREEDY, max_tokens=12, ignore_eos=True))
    for _ in range(3):
        model.engine.step()
    before = up.now
    for _ in range(num_steps):
        model.engine.step()
    machine = replace(
        FLEXGEN_T4,
        up=up.bytes_per_s,
        down=down.bytes_per_s,
        decode_matrix=2 * sizes.layer_params,
        decode_attention=math.inf,
        loads_first=False,
    )
    formula = Formula(sizes, OffloadWork(3, num_steps + 1), machine, rows, num_batches, False)
    placement = Placement(0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1 - share, share, 0.0)
    assert up.now - before == pytest.approx(ZigZag(formula, placement).run().decode_s, rel=0.01)


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


@pytest.mark.parametrize("num_groups", [1, 4])
def test_the_peak_of_the_device_is_within_the_planned_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_groups: int
) -> None:
    """Three of four layers pass through three buffers; all is computed in float32, and planned in 16 bits."""
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(**{**BASE, **wide, "head_dim": 64, "num_hidden_layers": NUM_LAYERS})
    tiny, rows, work = Tiny(tmp_path, save_random(config, tmp_path)), 16, OffloadWork(48, 6)
    counts, step_of = [0, 0], runner.bucket_step

    def counted(*args: Any) -> Any:
        step = step_of(*args)

        def run(*inputs: Any) -> Any:
            # The test's own thread counts already: it runs the layers, or all of a step that is not cut.
            with nullcontext() if current_thread() is main_thread() else Live(counts):
                return step(*inputs)

        return run

    monkeypatch.setattr(runner, "bucket_step", counted)
    model = tiny.load(
        **{"max_num_seqs": rows, "max_num_batched_tokens": rows * work.prompt_len, "num_blocks": rows},
        **{"max_model_len": 54, "block_size": BLOCK_SIZE, "graphs": "eager", "attention": "auto"},
        **{"offload_num_batches": num_groups, "offload_policy": "25,75,100,0,100,0"},
        enable_prefix_caching=False,
    )
    for each in prompts_of((work.prompt_len,) * rows):
        model.engine.add_request(each, replace(GREEDY, ignore_eos=True))
    sizes = offload_model(read_model(tmp_path), Format.BF16, PLAIN)
    machine = replace(FLEXGEN_T4, flexgen_memory=False)
    formula = Formula(sizes, work, machine, rows // num_groups, num_groups, False)
    placement = Placement(0.25, 0.75, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    [prompts, decode] = (2 * float(form @ [*placement, 1.0]) for form in formula.memory(3)["device"])
    assert 2 * formula.peak_bytes(placement)["device"] == max(prompts, decode)
    resolved = model.stats().resolved
    for planned in (prompts, decode):
        before = counts[1] = counts[0]
        with Live(counts):
            model.engine.step()
        computed = counts[1] - before
        assert computed > 0
        reached = resolved.device_weight_bytes + resolved.kv_bytes + computed
        assert 0.8 * planned < reached <= planned


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
