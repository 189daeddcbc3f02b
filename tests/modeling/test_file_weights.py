"""After packing, nothing of a model lies in the mapping of its checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpu_duo import HPUDuoModel
from hpu_duo.modeling import packed_linear
from hpu_duo.modeling.packed_linear import can_pack, leave_files, pack_linears, plain_bytes
from kernels_ref.x86 import library
from tests.modeling.families import FAMILIES, save_random
from tests.needs import needs_x86_kernels

# What a process has mapped is read from /proc.
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is there on Linux only")
# Linears of float32 arithmetic are packed for these alone.


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@on_linux
@pytest.mark.skipif(
    not (can_pack(torch.bfloat16) or library.lanes()),
    reason="linears are packed only with a compiler, and AVX2 or torch's oneDNN",
)
@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_a_packed_model_leaves_its_file(quantization: str, tmp_path: Path) -> None:
    save_random(FAMILIES["llama_biases_tied"](), tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    model = HPUDuoModel.from_pretrained(tmp_path, max_model_len=64, max_num_seqs=1, quantization=quantization)
    assert not mapped(tmp_path / "model.safetensors")
    assert model.generate([[3, 4, 5]], max_new_tokens=2).shape == (1, 5)


def resident(path: Path) -> int:
    """Kilobytes of the pages that this process has mapped of a file."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(
        next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
        for header in lines
        if header.endswith(str(path))
    )


def in_file(path: Path, stored: torch.Tensor) -> torch.Tensor:
    """Write a tensor to a file, and map it."""
    path.write_bytes(stored.view(torch.uint8).numpy().tobytes())
    storage = torch.UntypedStorage.from_file(str(path), False, stored.nbytes)
    return torch.empty(0, dtype=stored.dtype).set_(storage).view(stored.shape)


def linears_of(weights: Iterable[torch.Tensor]) -> nn.ModuleList:
    model = nn.ModuleList()
    for weight in weights:
        model.append(nn.Linear(*weight.T.shape, bias=False))
        model[-1].weight = nn.Parameter(weight, requires_grad=False)
    return model


@on_linux
@needs_x86_kernels
def test_a_file_whose_layers_are_all_packed_stays_mapped_until_the_last_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address may be of other memory otherwise, which would lose its pages."""
    first, second = (tmp_path / name for name in ("first", "second"))
    model = linears_of(in_file(path, torch.randn(256, 256).bfloat16()) for path in (first, second))
    seen: list[tuple[bool, bool]] = []

    class Seen(packed_linear.PanelLinear):
        def __init__(self, *args: Any) -> None:
            seen.append((mapped(first), mapped(second)))
            super().__init__(*args)

    monkeypatch.setattr(packed_linear, "PanelLinear", Seen)
    assert pack_linears(model, arithmetic=torch.float32) == 2
    assert seen == [(True, True)] * 2
    assert not mapped(first)
    assert not mapped(second)


@on_linux
@needs_x86_kernels
@pytest.mark.parametrize("is_written", [False, True])
def test_packing_lets_go_of_pages_that_hold_what_the_file_does(is_written: bool, tmp_path: Path) -> None:
    path, stored = tmp_path / "weights", torch.randn(2, 256, 256).bfloat16()
    weights = in_file(path, stored)
    if is_written:
        weights[1, 0, 0] += 1
        stored[1, 0, 0] += 1
    model = linears_of(weights)
    assert weights.equal(stored)
    assert resident(path) > 0
    assert pack_linears(model, arithmetic=torch.float32) == 2
    assert (resident(path) > 0) == is_written
    assert weights.equal(stored)


def test_what_is_left_moves_and_stays_tied() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.LayerNorm(3), nn.Linear(3, 7, bias=False))
    model[2].weight = model[0].weight
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert plain_bytes(model) == 4 * (21 + 3 + 3)
    assert leave_files(model, packed_bytes=4 * 27) == 4 * 27
    assert model[2].weight.data_ptr() == model[0].weight.data_ptr()
    for name, tensor in model.state_dict().items():
        assert tensor.equal(values[name])
        assert tensor.data_ptr() not in places


def test_nothing_moves_where_more_is_left_than_was_packed() -> None:
    model = nn.Linear(4, 4)
    place = model.weight.data_ptr()
    assert leave_files(model, packed_bytes=4 * 20 - 1) == 0
    assert model.weight.data_ptr() == place
