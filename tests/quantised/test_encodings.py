"""Encodings of weights, against their definitions in numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpu_duo.modeling.quantised.checkpoint import QuantisedTensor, dequantised
from hpu_duo.modeling.quantised.config import find_quantisation
from hpu_duo.modeling.quantised.fp8 import Fp8
from hpu_duo.modeling.quantised.int4 import unpack
from hpu_duo.modeling.quantised.mxfp4 import MXFP4
from tests.quantised.writers import FP8, KINDS, Kind, fp4_value, headers_of, mxfp4, pack


def stored(
    kind: Kind, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> QuantisedTensor:
    """The weight of one layer as a checkpoint has it."""
    found = find_quantisation(Path("config.json"), {"quantization_config": kind.config})
    assert found is not None
    headers = headers_of({f"q_proj.{end}": tensor for end, tensor in tensors.items()})
    state = dequantised(headers, found, dtype)
    assert list(state) == ["q_proj.weight"]
    weight = state["q_proj.weight"]
    assert isinstance(weight, QuantisedTensor)
    return weight


def read(kind: Kind, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Its values."""
    weight = stored(kind, tensors, dtype)
    assert tuple(weight[...].shape) == weight.shape
    return weight[...]


@pytest.mark.parametrize("shape", [(32, 48), (96, 16), (8, 80)])
@pytest.mark.parametrize("name", KINDS)
def test_weights_are_those_of_the_definition(name: str, shape: tuple[int, int]) -> None:
    tensors, expected = KINDS[name].write(np.random.default_rng(len(name)), *shape)
    weight = torch.from_numpy(expected.astype(np.float32))
    assert torch.equal(read(KINDS[name], tensors), weight)
    assert torch.equal(read(KINDS[name], tensors, torch.bfloat16), weight.bfloat16()), "rounded once"


@pytest.mark.parametrize("name", KINDS)
def test_weights_of_several_slabs_are_those_of_the_definition(name: str) -> None:
    tensors, expected = KINDS[name].write(np.random.default_rng(1), 576, 480)
    assert torch.equal(read(KINDS[name], tensors), torch.from_numpy(expected.astype(np.float32)))


def test_outputs_and_inputs_that_fill_no_word_are_read_without_the_padding() -> None:
    kind = KINDS["packed zeros"]
    tensors, expected = kind.write(np.random.default_rng(2), 13, 48)
    assert torch.equal(read(kind, tensors), torch.from_numpy(expected))
    kind = KINDS["packed channel"]
    tensors, expected = kind.write(np.random.default_rng(3), 7, 13)
    assert torch.equal(read(kind, tensors), torch.from_numpy(expected))


@given(st.sampled_from([2, 4, 8]), st.binary(min_size=4, max_size=64))
def test_packing_and_unpacking_gives_the_codes(bits: int, data: bytes) -> None:
    codes = np.frombuffer(data[: len(data) // 16 * 16 or 4], np.uint8) & ((1 << bits) - 1)
    codes = codes[: len(codes) * bits // 32 * 32 // bits]
    assert unpack(pack(codes, bits), bits).tolist() == codes.tolist()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_byte_in_every_place_is_unpacked(bits: int) -> None:
    words = np.array([byte << place for place in (0, 8, 16, 24) for byte in range(256)], np.uint64)
    signed = torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())
    mask = (1 << bits) - 1
    expected = [[int(word) >> shift & mask for shift in range(0, 32, bits)] for word in words]
    assert unpack(signed[:, None], bits).tolist() == expected


def test_all_codes_of_fp8() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    scale = torch.tensor(0.25)
    headers = headers_of({"weight": codes, "weight_scale": scale})
    weight = Fp8("tensor").read({"weight": codes, "weight_scale": scale}, headers).dequantised(torch.float32)
    assert np.array_equal(weight[0].numpy(), FP8 * np.float32(0.25), equal_nan=True)


@pytest.mark.parametrize("is_float8", [False, True])
def test_all_codes_and_exponents_of_mxfp4(is_float8: bool) -> None:
    # Row by row the exponents, in each block all codes twice.
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)
    blocks = torch.from_numpy(np.tile(codes[0::2] | codes[1::2] << 4, (1, 256, 1, 1)))
    scales: Any = torch.arange(256, dtype=torch.uint8)[None, :, None]
    scales = scales.view(torch.float8_e8m0fnu) if is_float8 else scales
    tensors = {"_blocks": blocks, "_scales": scales}
    weight = MXFP4().read(tensors, headers_of(tensors)).dequantised(torch.float32)
    assert weight.shape == (1, 32, 256)
    values = [[math.ldexp(fp4_value(int(code)), e - 127) for e in range(255)] for code in codes]
    with np.errstate(over="ignore"):
        expected = np.array(values).astype(np.float32)
    assert np.array_equal(weight[0, :, :255].numpy(), expected)
    assert weight[0, :, 255].isnan().all()


def test_experts_of_mxfp4_are_those_of_the_definition() -> None:
    tensors, expected = mxfp4(np.random.default_rng(0), 3, 6, 64)
    for dtype in (torch.float32, torch.bfloat16):
        stored = MXFP4().read(tensors, headers_of(tensors))
        weight = torch.from_numpy(expected).to(dtype)
        assert torch.equal(stored.dequantised(dtype), weight)
        # Also of a part, which need not begin and end with a block of inputs.
        for dim, begin, end in ((0, 1, 3), (1, 0, 32), (1, 8, 41), (2, 2, 5)):
            expected_part = weight.narrow(dim, begin, end - begin)
            assert torch.equal(stored.part(dim, slice(begin, end), dtype), expected_part)
