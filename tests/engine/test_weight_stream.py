"""Weights on the host give the tokens of weights on the device."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig

from hpu_duo.device.runtime import HostMemory
from hpu_duo.modeling.weight_stream import (
    StreamMover,
    ThreadMover,
    Weights,
    WeightStream,
    buffer_numbers,
    choose_layers,
    copied_layers,
    weight_bytes,
)
from hpu_duo.sampling import SamplingParams
from tests.engine.tiny import Tiny, serve, tokens_of
from tests.modeling.families import BASE, prompts_of, save_random

pytestmark = pytest.mark.instruction_set

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = prompts_of((13, 5, 22, 9))


@given(st.integers(1, 60), st.integers(1, 6))
def test_layers_that_follow_each_other_have_their_own_buffers(num_layers: int, num_ahead: int) -> None:
    numbers = buffer_numbers(num_layers, num_ahead)
    size = min(num_ahead + 1, num_layers)
    assert len(numbers) == num_layers
    assert max(numbers) + 1 == -(-num_layers // (num_layers // size))
    for first in range(num_layers):
        window = {numbers[(first + each) % num_layers] for each in range(size)}
        assert len(window) == size


@pytest.mark.parametrize(("num_layers", "num_ahead"), [(1, 1), (3, 1), (4, 1), (5, 1), (5, 3), (9, 3)])
def test_layers_that_share_a_buffer_are_copied_in_each_step(num_layers: int, num_ahead: int) -> None:
    layers, moved = [nn.Linear(8, 8) for _ in range(num_layers)], list[int]()

    class Mover:
        def move(self, source: Any, target: torch.Tensor) -> Any:
            moved.append(source.data_ptr())
            return SimpleNamespace(hold=lambda: None)

    stream = WeightStream(layers, torch.device("cpu"), Mover(), num_ahead)
    for _ in range(2):
        moved.clear()
        for number in range(num_layers):
            stream.arrive(number)
    assert len(moved) == sum(copied_layers(num_layers, num_ahead))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny Llama of five layers."""
    path = tmp_path_factory.mktemp("deep")
    return Tiny(path, save_random(LlamaConfig(**{**BASE, "num_hidden_layers": 5}), path))


@pytest.fixture(scope="module")
def expected(deep: Tiny) -> list[list[list[int]]]:
    """Tokens with all weights on the device."""
    return tokens_of(serve(deep.load(), PROMPTS, GREEDY))


def stream_of(model: Any) -> WeightStream:
    stream = model.engine.runner.executor.model.stream
    assert stream is not None
    return stream


@pytest.mark.parametrize(
    ("policy", "num_host", "num_disk"), [("40,20,100,0,100,0", 1, 2), ("0,0,100,0,100,0", 0, 5)]
)
def test_tokens_are_those_of_resident_weights_from_a_disk(
    deep: Tiny, expected: list[list[list[int]]], tmp_path: Path, policy: str, num_host: int, num_disk: int
) -> None:
    model = deep.load(offload_policy=policy, offload_disk=tmp_path / "new", graphs="eager")
    assert tokens_of(serve(model, PROMPTS, GREEDY)) == expected
    stream, layer_bytes = stream_of(model), weight_bytes(deep.model.model.layers[0])
    assert stream.num_bytes == pytest.approx(num_host * layer_bytes, rel=0.01)
    assert stream.disk_bytes == pytest.approx(num_disk * layer_bytes, rel=0.01)
    resolved = model.stats().resolved
    assert (resolved.host_weight_bytes, resolved.disk_weight_bytes) == (stream.num_bytes, stream.disk_bytes)
    # Three buffers, since two do not divide three or five layers.
    on_device = resolved.weight_bytes - (num_host + num_disk - 3) * layer_bytes
    assert resolved.device_weight_bytes == pytest.approx(on_device, rel=0.01)
    assert not list((tmp_path / "new").iterdir())  # files have no names
    assert any(f"{num_host} layers" in note and f"of {num_disk}," in note for note in model.stats().notes)


def test_weights_in_files_reach_a_device_by_pinned_buffers(tmp_path: Path) -> None:
    layers = [nn.Linear(8, 8) for _ in range(4)]
    weights = [layer.weight.detach().clone() for layer in layers]
    pinned: list[int] = []
    waits: list[int] = []
    mark = SimpleNamespace(hold_computation=lambda: None, wait=lambda: waits.append(1))

    def pin(memory: torch.Tensor) -> Any:
        pinned.append(memory.nbytes)
        return lambda: None

    mover = StreamMover(SimpleNamespace(after_launched=nullcontext, mark=lambda: mark), pin)
    stream = WeightStream(layers, torch.device("cpu"), mover, 1, tmp_path, {0, 2, 3})
    assert pinned == [256, 256, 256]  # the layer on the host, and two buffers
    for number in (*range(4), *range(4)):
        stream.arrive(number)
        assert torch.equal(layers[number].weight, weights[number])
    assert len(waits) == 5  # of 7 copies from files


def test_files_without_weights_on_the_host_pin_buffers_alone_and_outlive_failed_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [nn.Linear(8, 8) for _ in range(3)]
    weight, pinned = layers[0].weight.detach().clone(), list[int]()
    mark = SimpleNamespace(hold_computation=lambda: None, wait=lambda: None)

    def pin(memory: torch.Tensor) -> Any:
        pinned.append(memory.nbytes)
        return lambda: None

    mover = StreamMover(SimpleNamespace(after_launched=nullcontext, mark=lambda: mark), pin)
    stream = WeightStream(layers, torch.device("cpu"), mover, 1, tmp_path, {0, 1, 2})
    assert pinned == [256, 256]
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: 0)
        for _ in range(3):
            with pytest.raises(OSError, match="expected 256 bytes of weights in a file, got 0"):
                stream.arrive(0)
    stream.arrive(0)
    assert torch.equal(layers[0].weight, weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload_policy": (50, 50, 100, 0, 100, 0)}, "expected offload_policy as text, got"),
        ({"offload_disk": True}, "expected offload_disk to be a folder, got True"),
        ({"offload_policy": "60,50,100,0,100,0"}, "weights that add up to 100 at most"),
        ({"offload_policy": "50,50,0,100,100,0"}, "stay on the device"),
        ({"offload_policy": "50,50,50,40,100,0"}, "that add up to 100"),
        ({"offload_policy": "50,50,100,0,50,40"}, "that add up to 100"),
        ({"offload_policy": "50,50,100,0,50,50"}, "expected act_host of one group or more"),
        ({"offload_policy": "50,50,40,60,100,0"}, r"the GiB of 60 % .* got cpu_attention=None"),
        ({"offload_policy": "50,40,100,0,100,0"}, "offload_disk=None and 10 % on the disk"),
        ({"offload_disk": "x"}, "and 0 % on the disk"),
        ({"offload_policy": "50,50,100,0,100,0", "cpu_offload_gb": 1.0}, "got both"),
        ({"offload_policy": "50,0,100,0,100,0", "offload_disk": "/proc/none"}, "expected offload_disk to be"),
    ],
)
def test_placements_that_are_not_executed_are_refused(
    deep: Tiny, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        deep.load(**options)


@pytest.mark.parametrize(
    ("graphs", "count", "options"),
    [
        ("eager", 5, {}),
        ("replay", 3, {"offload_prefetch_step": 2}),
        ("replay", 1, {"attention": "auto", "pack_weights": True}),
        pytest.param("compile", 5, {}, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param("replay", 4, {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("forked_ranks")
def test_tokens_are_those_of_resident_weights(
    deep: Tiny, expected: list[list[list[int]]], graphs: str, count: int, options: dict[str, Any]
) -> None:
    layer_bytes = weight_bytes(deep.model.model.layers[0]) // options.get("tensor_parallel_size", 1)
    gib = (count - 0.5) * layer_bytes / 2**30
    model = deep.load(graphs=graphs, cpu_offload_gb=gib, **options)
    assert tokens_of(serve(model, PROMPTS, GREEDY)) == expected
    stream = stream_of(model)
    # Panels have whole rows of 16 or 32 outputs, which rounds tiny layers up.
    assert count * layer_bytes * 0.98 <= stream.num_bytes <= count * layer_bytes * 1.4
    assert stream.buffer_bytes <= (options.get("offload_prefetch_step", 1) + 2) * layer_bytes * 1.4
    assert any(f"{count} layers" in note for note in model.stats().notes)


def test_quantised_weights_move_as_codes(deep: Tiny) -> None:
    resident = deep.load(quantization="int4", graphs="eager")
    policy = "0,100,100,0,100,0"
    model = deep.load(quantization="int4", graphs="eager", offload_policy=policy, offload_num_batches=2)
    assert tokens_of(serve(model, PROMPTS, GREEDY)) == tokens_of(serve(resident, PROMPTS, GREEDY))
    # Weights in 16 bits take half of the float32 ones; int4 codes less, with scales and alignment.
    assert stream_of(model).num_bytes < 5 * weight_bytes(deep.model.model.layers[0]) / 2


def test_a_layer_waits_for_its_weights_and_later_ones_are_on_their_way() -> None:
    layers = [nn.Linear(8, 8) for _ in range(4)]
    weights = [layer.weight.detach().clone() for layer in layers]
    asked: list[int] = []

    class Recording(ThreadMover):
        def move(self, source: Weights, target: torch.Tensor) -> Any:
            assert isinstance(source, torch.Tensor)
            asked.append(source.data_ptr())
            return super().move(source, target)

    stream = WeightStream(layers, torch.device("cpu"), Recording(bytes_per_s=1e6), num_ahead=1)
    for turn in range(2):
        for number, layer in enumerate(layers):
            arrive = stream.arrival_of(layer)
            assert arrive is not None
            arrive()
            assert torch.equal(layer.weight, weights[number])
            assert len(asked) == 4 * turn + number + 2
    assert stream.arrival_of(nn.Linear(8, 8)) is None


def test_devices_without_copies_beside_steps_are_refused(deep: Tiny, simulated_hpu: object) -> None:
    with pytest.raises(ValueError, match="need a CPU or CUDA"):
        deep.load(device="hpu-sim", cpu_offload_gb=1e-5)


@pytest.mark.gpu
def test_tokens_are_those_of_resident_weights_on_cuda(deep: Tiny, expected: list[list[list[int]]]) -> None:
    gib = 3.5 * weight_bytes(deep.model.model.layers[0]) / 2**30
    model = deep.load(device="cuda", graphs="eager", cpu_offload_gb=gib)
    assert tokens_of(serve(model, PROMPTS, GREEDY)) == expected
    with pytest.raises(ValueError, match="records whole steps"):
        deep.load(device="cuda", graphs="cuda", cpu_offload_gb=gib)


def test_more_weights_than_the_host_has_memory_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpu_duo.modeling.weight_stream.host_memory", lambda: HostMemory(total=4096, free=64))
    with pytest.raises(ValueError, match="free memory of the host, 64 bytes, got 256 bytes"):
        WeightStream([nn.Linear(8, 8)], torch.device("cpu"), ThreadMover())


def test_weights_of_several_layers_are_refused() -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    layers[1].weight = layers[0].weight
    with pytest.raises(ValueError, match="weights of their own"):
        WeightStream(layers, torch.device("cpu"), ThreadMover())


def test_bad_sizes_are_refused(deep: Tiny) -> None:
    layers = list(deep.model.model.layers)
    with pytest.raises(ValueError, match="cpu_offload_gb of at most"):
        choose_layers(layers, 1 << 40)
    for options, message in (
        ({"cpu_offload_gb": -1.0}, "0 or more GiB"),
        ({"offload_prefetch_step": 0}, "offload_prefetch_step"),
    ):
        with pytest.raises(ValueError, match=message):
            deep.load(**options)


def test_a_failed_copy_ends_the_step_and_is_repeated(deep: Tiny, expected: list[list[list[int]]]) -> None:
    model = deep.load(cpu_offload_gb=weight_bytes(deep.model.model.layers[0]) * 4.5 / 2**30, graphs="eager")

    class BrokenOnce(ThreadMover):
        is_broken = True

        def _copy(self, *args: Any) -> None:
            if self.is_broken:
                self.is_broken = False
                raise RuntimeError("the link is gone")
            super()._copy(*args)

    stream_of(model).mover = BrokenOnce()
    with pytest.raises(RuntimeError, match="the link is gone"):
        serve(model, PROMPTS, GREEDY)
    assert tokens_of(serve(model, PROMPTS, GREEDY)) == expected


def test_an_interrupt_behind_the_begin_of_a_copy_has_it_copied_again() -> None:
    layers = [nn.Linear(8, 8, bias=False) for _ in range(6)]
    weights = [layer.weight.detach().clone() for layer in layers]

    class Interrupted(ThreadMover):
        num_moves = 0

        def move(self, source: Any, target: torch.Tensor) -> Any:
            self.num_moves += 1
            begun = super().move(source, target)
            if self.num_moves == 4:
                raise KeyboardInterrupt
            return begun

    stream = WeightStream(layers, torch.device("cpu"), Interrupted())
    for number in range(2):
        stream.arrive(number)
    with pytest.raises(KeyboardInterrupt):
        stream.arrive(2)
    for number, (layer, weight) in enumerate(zip(layers, weights)):
        stream.arrive(number)
        assert torch.equal(layer.weight, weight), number
