"""Values between processes: what is plain comes through as it was, the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from graphs import BatchShape, BucketTable, MissPolicy, Phase
from hpu_duo.device.plain import decode, encode
from hpu_duo.device.ranks import Sent
from hpu_duo.engine.orders import Execute, SetTable
from hpu_duo.engine.step_input import StepInput

SHAPE = BatchShape(Phase(unique=True), 4, 0, 2, 4)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, -(2**70), 0.1, float("inf"), "tèxt", b"\x00\xff", Path("a/b"), torch.bfloat16),
        *([1, (2, {3})], {("a", 1): [None], "list": ["dict"]}, frozenset({"x"}), Sent(1, 2, 3), SHAPE),
        SetTable(BucketTable((SHAPE,)), MissPolicy.EAGER),
    ],
    ids=str,
)
def test_plain_values_come_through_with_their_types(value: object) -> None:
    read = decode(encode(value))
    assert read == value
    assert type(read) is type(value)


def test_a_step_comes_through_with_arrays_that_can_be_written() -> None:
    ints = np.arange(7, dtype=np.int32)
    message = StepInput(SHAPE, SHAPE, ints, 1, 2, None, np.zeros(0, np.int32), (3,))
    read = decode(encode(Execute(message)))
    assert read.message.ints.dtype == np.int32
    assert read.message.ints.tolist() == ints.tolist()
    assert read.message.ints.flags.writeable
    assert read.message.sampled.shape == (0,)
    assert (read.message.shape, read.message.host_sampled, read.is_sampled) == (SHAPE, (3,), True)
    tensor = torch.arange(6).reshape(2, 3).to(torch.bfloat16)
    assert torch.equal(decode(encode([tensor, torch.tensor(2.0)]))[0], tensor)


@pytest.mark.parametrize("value", [print, object(), np.array([print])], ids=["function", "object", "array"])
def test_what_is_not_plain_is_refused_where_it_is_written(value: object) -> None:
    with pytest.raises(TypeError, match="expected plain data"):
        encode([value])


@pytest.mark.parametrize(
    "head",
    [
        ["object", "subprocess:Popen", ["list", "true"]],
        ["object", "os:system", "true"],
        ["enum", "builtins:eval", "1"],
        ["named", "builtins:tuple"],
        ["object", "nowhere:Class"],
        ["array", "|O", [1]],
        ["array", "<i4", [1000]],
        ["array", "<i4", [-1]],
        ["code"],
        [],
    ],
    ids=str,
)
def test_messages_that_name_anything_else_are_refused_where_they_are_read(head: object) -> None:
    text = json.dumps(head).encode()
    with pytest.raises(ValueError, match="expected"):
        decode(len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize("empty", [torch.zeros(0, 4), torch.zeros(2, 0, dtype=torch.bfloat16)])
def test_tensors_without_elements_come_back(empty: torch.Tensor) -> None:
    found = decode(encode(empty))
    assert (found.shape, found.dtype) == (empty.shape, empty.dtype)
