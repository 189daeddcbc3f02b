"""Quantised weights as producers write them, and what they mean, in numpy and by the definitions alone."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from hpu_duo.modeling.quantised.format import Header

Tensors = dict[str, torch.Tensor]
"""The tensors of a weight by the ends of their names."""
Write = Callable[[np.random.Generator, int, int], tuple[Tensors, np.ndarray]]
"""From outputs and inputs to random codes and the float32 weight that they stand for."""


def fp8_value(code: int) -> float:
    """e4m3fn: a sign, four bits of exponent, three of fraction; no infinities."""
    sign, exponent, fraction = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


FP8 = np.array([fp8_value(code) for code in range(256)], np.float32)


def fp4_value(code: int) -> float:
    """e2m1: a sign, two bits of exponent, one of fraction."""
    sign, exponent, fraction = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1))


def pack(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Words of 32 bits along the last dimension; ``order`` has the code in each place of a word."""
    count = 32 // bits
    padded = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // count) * count), np.uint64)
    padded[..., : codes.shape[-1]] = codes
    words = np.zeros((*codes.shape[:-1], padded.shape[-1] // count), np.uint64)
    for place in range(count):
        words |= padded[..., place if order is None else order[place] :: count] << np.uint64(place * bits)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def half(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).astype(np.float16))


def scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers that float16 has, for codes of about eight."""
    return (rng.uniform(0.5, 1.5, shape) / 64).astype(np.float16).astype(np.float32)


def grouped(
    codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | int, group_of: np.ndarray | None = None
) -> np.ndarray:
    """The weight of codes ``[N, K]``, input by input."""
    num_inputs, num_groups = codes.shape[1], scale.shape[1]
    weight = np.empty(codes.shape, np.float32)
    for column in range(num_inputs):
        group = column * num_groups // num_inputs if group_of is None else group_of[column]
        zeros = zero if isinstance(zero, int) else zero[:, group].astype(np.float32)
        weight[:, column] = (codes[:, column].astype(np.float32) - zeros) * scale[:, group]
    return weight


def fp8(granularity: str, end: str = "weight_scale", block: tuple[int, int] = (24, 20)) -> Write:
    def write(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, np.ndarray]:
        codes = rng.integers(0, 256, (n, k), np.uint8)
        codes[(codes & 127) == 127] = 0
        codes[(codes & 120) >= 80] &= 0xBF  # nothing above 4
        shape = {"tensor": (), "channel": (n, 1), "block": (-(-n // block[0]), -(-k // block[1]))}[
            granularity
        ]
        scale = scales(rng, *shape)
        if granularity == "block":
            factor = np.array([[scale[i // block[0], j // block[1]] for j in range(k)] for i in range(n)])
        else:
            factor = scale
        stored = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), end: torch.tensor(scale)}
        return {**stored, "input_scale": torch.tensor(1.0)}, FP8[codes] * factor

    return write


def int8(is_symmetric: bool = True) -> Write:
    def write(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, np.ndarray]:
        codes, scale = rng.integers(-128, 128, (n, k), np.int8), scales(rng, n, 1) / np.float32(16)
        tensors = {"weight": torch.from_numpy(codes), "weight_scale": torch.from_numpy(scale)}
        zero = np.zeros((n, 1), np.int8)
        if not is_symmetric:
            zero = rng.integers(-20, 20, (n, 1), np.int8)
            tensors["weight_zero_point"] = torch.from_numpy(zero)
        return tensors, (codes.astype(np.float32) - zero.astype(np.float32)) * scale

    return write


def packed(bits: int = 4, group: int | None = 16, zeros: str = "", is_mixed: bool = False) -> Write:
    """compressed-tensors; ``zeros`` is "packed", "plain" or none."""

    def write(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, np.ndarray]:
        num_groups = 1 if group is None else k // group
        codes, scale = rng.integers(0, 1 << bits, (n, k)), scales(rng, n, num_groups)
        tensors = {
            "weight_packed": pack(codes, bits),
            "weight_scale": half(scale),
            "weight_shape": torch.tensor([n, k]),
        }
        zero: Any = 1 << (bits - 1)
        if zeros:
            zero = rng.integers(0, 1 << bits, (n, num_groups))
            plain = torch.from_numpy((zero - (1 << (bits - 1))).astype(np.int8))
            tensors["weight_zero_point"] = pack(zero.T, bits).T.contiguous() if zeros == "packed" else plain
        order = rng.permutation(np.repeat(np.arange(num_groups), k // num_groups)) if is_mixed else None
        if order is not None:
            tensors["weight_g_idx"] = torch.from_numpy(order.astype(np.int32))
        return tensors, grouped(codes, scale, zero, order)

    return write


def gptq(
    bits: int = 4, group: int = 16, *, version: int = 1, is_symmetric: bool = False, is_mixed: bool = False
) -> Write:
    def write(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, np.ndarray]:
        codes, scale = rng.integers(0, 1 << bits, (n, k)), scales(rng, n, k // group)
        zero = rng.integers(0, 1 << bits, scale.shape)
        if is_symmetric:
            zero[:] = 1 << (bits - 1)
        order = np.repeat(np.arange(k // group), group)
        if is_mixed:
            order = rng.permutation(order)
        stored = (zero - 1) % (1 << bits) if version == 1 else zero
        tensors = {
            "qweight": pack(codes, bits).T.contiguous(),
            "qzeros": pack(stored.T, bits),
            "scales": half(scale.T),
            "g_idx": torch.from_numpy(order.astype(np.int32)),
        }
        return tensors, grouped(codes, scale, zero, order)

    return write


def awq(group: int = 16) -> Write:
    def write(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, np.ndarray]:
        codes, scale = rng.integers(0, 16, (n, k)), scales(rng, n, k // group)
        zero = rng.integers(0, 16, scale.shape)
        tensors = {
            "qweight": pack(codes.T, 4, AWQ_ORDER),
            "qzeros": pack(zero.T, 4, AWQ_ORDER),
            "scales": half(scale.T),
        }
        return tensors, grouped(codes, scale, zero)

    return write


def mxfp4(rng: np.random.Generator, num_experts: int, n: int, k: int) -> tuple[Tensors, np.ndarray]:
    """Experts, whose weights are ``[E, K, N]``."""
    codes = rng.integers(0, 16, (num_experts, n, k), np.uint8)
    exponents = rng.integers(118, 123, (num_experts, n, k // 32), np.uint8)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(num_experts, n, k // 32, 16)
    weight = np.empty((num_experts, k, n), np.float32)
    for e, i, j in np.ndindex(codes.shape):
        weight[e, j, i] = math.ldexp(fp4_value(int(codes[e, i, j])), int(exponents[e, i, j // 32]) - 127)
    return {"_blocks": torch.from_numpy(blocks), "_scales": torch.from_numpy(exponents)}, weight


def compressed(
    kind: str, weights: dict[str, Any], ignore: tuple[str, ...] = ("lm_head",), **more: Any
) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": [*ignore],
        **more,
    }


def _int(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **more}


_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}


@dataclass(frozen=True)
class Kind:
    """A producer's way.

    Attributes:
        config: its ``quantization_config``.
        write: one weight.
    """

    config: dict[str, Any]
    write: Write


KINDS: dict[str, Kind] = {
    "fp8 block": Kind(
        {"quant_method": "fp8", "weight_block_size": [24, 20], "modules_to_not_convert": ["lm_head"]},
        fp8("block", "weight_scale_inv"),
    ),
    "fp8 tensor": Kind({"quant_method": "fp8", "activation_scheme": "static"}, fp8("tensor")),
    "float channel": Kind(compressed("float-quantized", {**_FLOAT, "strategy": "channel"}), fp8("channel")),
    "float block": Kind(
        compressed("float-quantized", {**_FLOAT, "strategy": "block", "block_structure": [24, 20]}),
        fp8("block"),
    ),
    "naive float": Kind(compressed("naive-quantized", {**_FLOAT, "strategy": "tensor"}), fp8("tensor")),
    "modelopt": Kind(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head*"]}, fp8("tensor")
    ),
    "int8": Kind(compressed("int-quantized", _int(8, "channel")), int8()),
    "int8 zeros": Kind(
        compressed("naive-quantized", {**_int(8, "channel"), "symmetric": False}), int8(is_symmetric=False)
    ),
    "packed": Kind(compressed("pack-quantized", _int(4, "group", group_size=16)), packed()),
    "packed 2": Kind(compressed("pack-quantized", _int(2, "group", group_size=8)), packed(2, 8)),
    "packed channel": Kind(compressed("pack-quantized", _int(8, "channel")), packed(8, None)),
    "packed zeros": Kind(
        compressed("pack-quantized", {**_int(4, "group", group_size=16), "symmetric": False}),
        packed(zeros="packed"),
    ),
    "packed plain zeros": Kind(
        compressed("pack-quantized", {**_int(4, "group", group_size=8), "symmetric": False}),
        packed(4, 8, zeros="plain"),
    ),
    "packed mixed": Kind(
        compressed("pack-quantized", _int(4, "group", group_size=16, actorder="group")),
        packed(is_mixed=True),
    ),
    "gptq": Kind(_GPTQ, gptq()),
    "gptq 2": Kind({**_GPTQ, "checkpoint_format": "gptq_v2"}, gptq(version=2)),
    "gptq 2, by a newer name": Kind({**_GPTQ, "format": "gptq_v2"}, gptq(version=2)),
    "gptq 8 bits": Kind({**_GPTQ, "bits": 8}, gptq(8)),
    "gptq mixed": Kind({**_GPTQ, "desc_act": True}, gptq(is_mixed=True)),
    "gptq symmetric": Kind({**_GPTQ, "sym": True}, gptq(is_symmetric=True)),
    "gptq symmetric 2, by the name of 1": Kind({**_GPTQ, "sym": True}, gptq(version=2, is_symmetric=True)),
    "awq": Kind(
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}, awq()
    ),
}

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}


class Memory:
    """Tensors in place of an open file."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def headers_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Header]:
    """Headers of tensors in memory."""
    file = Memory(tensors)
    return {
        name: Header(name, Path("model.safetensors"), _DTYPES[tensor.dtype], tuple(tensor.shape), file)
        for name, tensor in tensors.items()
    }


LINEAR = r".*_proj\.weight"
"""Names of weights that producers quantise: no embeddings, norms, routers or heads."""


def write_twins(plain: Path, quantised: Path, kind: Kind, *, names: str = LINEAR, seed: int = 0) -> Path:
    """Replace weights of a checkpoint in place, and write the quantised checkpoint that they come from.

    Args:
        plain: a checkpoint in one file; its weights become those that the codes stand for.
        quantised: a new directory.
        kind: the producer.
        names: a regular expression of names of weights.
        seed: of the codes.
    """
    shutil.copytree(plain, quantised)
    tensors = load_file(plain / "model.safetensors")
    stored: Tensors = {}
    rng = np.random.default_rng(seed)
    for name, tensor in tensors.items():
        if re.fullmatch(names, name) is None:
            stored[name] = tensor
            continue
        written, weight = kind.write(rng, *tensor.shape)
        tensors[name] = torch.from_numpy(np.ascontiguousarray(weight, np.float32))
        layer = name.removesuffix(".weight")
        stored |= {f"{layer}.{end}": each for end, each in written.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    set_config(quantised, kind.config)
    return quantised


def set_config(directory: Path, quantization_config: dict[str, Any] | None) -> None:
    """Set the field of a config.json; None is the same as no field."""
    file = directory / "config.json"
    fields = {**json.loads(file.read_text()), "quantization_config": quantization_config}
    file.write_text(json.dumps(fields))
