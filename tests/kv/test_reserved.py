"""Stores take memory as they are written, not before."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.kv.store import KVStore, reserved_zeros
from tests.kv.layers import layer_kv

CPU = torch.device("cpu")
MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("shape", [(3, 2, 5), (1,), (0, 4), (4, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reserved_memory_is_zeros_that_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = reserved_zeros(shape, dtype, CPU)
    assert tensor.equal(torch.zeros(shape, dtype=dtype))
    assert tensor.fill_(2).equal(torch.full(shape, 2, dtype=dtype))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_store_takes_memory_block_by_block() -> None:
    plan = MemoryPlan(
        (layer_kv(4, 4, 64, 128),), dtype_bytes=2, block_size=128, max_num_seqs=256, num_blocks=1024
    )
    before = resident_bytes()
    store = KVStore(plan, torch.bfloat16, CPU)
    assert store.num_bytes > 160 * MIB
    assert resident_bytes() - before < 8 * MIB
    null = torch.tensor([[plan.num_blocks], [plan.num_blocks]], dtype=torch.int32)
    store.carry_out(null, null[:, :0])
    store.layers[0][0].views[0][:64].fill_(1)
    assert resident_bytes() - before < 16 * MIB
    assert store.layers[0][0].views[0][64:].count_nonzero() == 0


def test_a_store_that_the_system_refuses_is_named_by_its_size() -> None:
    with pytest.raises(MemoryError, match="room for 4,611,686,018,427,387,904 bytes of keys or values"):
        reserved_zeros((1 << 62,), torch.int8, CPU)
