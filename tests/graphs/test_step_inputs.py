from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs import BatchShape, DeviceInputs, HostInputs
from graphs.buffers import pack

LARGE = BatchShape.parse("csu/q64/s8/u32/l4")
SMALL = BatchShape.parse("--u/q3/s0/u7/l3")


def fields_of(bucket: BatchShape) -> dict[str, tuple[int, ...]]:
    return {
        "token_ids": (bucket.query_len,),
        "slots": (bucket.query_len,),
        "visible": (bucket.query_len, bucket.num_shared_blocks),
        "owner": (bucket.num_unique_blocks,),
    }


def sides(largest: BatchShape = LARGE) -> tuple[HostInputs, DeviceInputs]:
    fields = fields_of(largest)
    return HostInputs(fields_of, fields), DeviceInputs(fields_of, fields)


def write(host: HostInputs, bucket: BatchShape, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    written = {}
    for name, view in host.stage(bucket).items():
        view[...] = written[name] = rng.integers(0, 100, view.shape)
    return written


@given(
    st.sampled_from(["c--", "cs-", "csu", "--u"]),
    st.integers(1, 64),
    st.integers(0, 8),
    st.integers(0, 32),
    st.integers(0, 2**31),
)
def test_device_fields_hold_what_was_written_on_the_host(
    phase: str, query_len: int, num_shared: int, num_unique: int, seed: int
) -> None:
    host, device = sides()
    for use in range(2):
        num_shared = num_shared if "s" in phase else 0
        num_unique = num_unique if "u" in phase else 0
        bucket = BatchShape.parse(f"{phase}/q{query_len}/s{num_shared}/u{num_unique}/l1")
        written = write(host, bucket, seed + use)
        tensors = device.copy_in(bucket, host.take(bucket))
        assert list(tensors) == list(fields_of(bucket))
        for name, array in written.items():
            assert tensors[name].dtype == torch.int32
            assert np.array_equal(tensors[name].numpy(), array)


def test_fields_start_at_aligned_addresses_and_do_not_overlap() -> None:
    host, device = sides()
    for bucket in (LARGE, SMALL):
        tensors = device.copy_in(bucket, host.take(bucket))
        slots = list(device.layout(bucket).slots.values())
        assert all(before.stop <= after.offset for before, after in pairwise(slots))
        assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values() if tensor.numel())


def test_one_copy_moves_exactly_what_the_bucket_needs() -> None:
    host, device = sides()
    num_largest = 4 * (64 + 64 + 64 * 8 + 32)
    assert device.layout(LARGE).num_bytes == num_largest
    device.copy_in(SMALL, host.take(SMALL))
    # Fields of 3, 3, 0 and 7 items, of which the first two are followed by alignment.
    assert (device.num_copies, device.bytes_copied) == (1, 4 * (16 + 16 + 7))
    assert host.take(SMALL).nbytes == pack(fields_of(SMALL)).num_bytes == 4 * (16 + 16 + 7)
    device.copy_in(LARGE, host.take(LARGE))
    assert (device.num_copies, device.bytes_copied) == (2, 4 * (16 + 16 + 7) + num_largest)


def test_a_copy_leaves_device_memory_behind_it_alone() -> None:
    host, device = sides()
    host.stage(LARGE)["owner"][:] = 5
    tensors = device.copy_in(LARGE, host.take(LARGE))
    host.stage(LARGE)["owner"][:] = 9
    device.copy_in(SMALL, host.take(SMALL))
    assert tensors["owner"].tolist() == [5] * 32


def test_a_bucket_keeps_its_tensors_and_addresses_while_others_run() -> None:
    host, device = sides()
    first = device.copy_in(SMALL, host.take(SMALL))
    tensors = dict(first)
    addresses = {name: tensor.data_ptr() for name, tensor in first.items()}
    device.copy_in(LARGE, host.take(LARGE))
    again = device.copy_in(SMALL, host.take(SMALL))
    assert again is first
    assert all(again[name] is tensor for name, tensor in tensors.items())
    assert {name: tensor.data_ptr() for name, tensor in again.items()} == addresses


def test_addresses_outlive_the_cached_views_of_many_missed_shapes() -> None:
    bucket = BatchShape.parse("--u/q2/s0/u2000/l1")
    host, device = sides(bucket)
    before = device.copy_in(bucket, host.take(bucket))["owner"].data_ptr()
    for num_unique in range(1500):
        other = BatchShape.parse(f"--u/q2/s0/u{num_unique}/l1")
        device.copy_in(other, host.take(other))
    assert device.copy_in(bucket, host.take(bucket))["owner"].data_ptr() == before


def test_what_was_taken_is_not_changed_by_later_writes() -> None:
    host, device = sides()
    host.stage(SMALL)["token_ids"][:] = [8, 9, 0]
    taken = host.take(SMALL)
    host.stage(SMALL)["token_ids"][:] = 1
    assert device.copy_in(SMALL, taken)["token_ids"].tolist() == [8, 9, 0]


def test_the_array_of_another_bucket_is_refused() -> None:
    host, device = sides()
    with pytest.raises(ValueError, match=r"expected int32 \[39\], got int32 \[672\]"):
        device.copy_in(SMALL, host.take(LARGE))
    with pytest.raises(ValueError, match=r"expected int32 \[39\], got int64 \[39\]"):
        device.copy_in(SMALL, host.take(SMALL).astype(np.int64))


def test_a_bucket_larger_than_the_buffers_is_refused() -> None:
    host, device = sides(SMALL)
    with pytest.raises(ValueError, match="which needs 2688"):
        host.stage(LARGE)
    with pytest.raises(ValueError, match="which needs 2688"):
        device.layout(LARGE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fields_arrive_on_a_cuda_device() -> None:
    fields = fields_of(LARGE)
    host, device = HostInputs(fields_of, fields), DeviceInputs(fields_of, fields, device="cuda")
    host.stage(SMALL)["token_ids"][:] = [4, 5, 6]
    tensors = device.copy_in(SMALL, host.take(SMALL))
    assert tensors["token_ids"].is_cuda
    assert tensors["token_ids"].tolist() == [4, 5, 6]
