from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs import BatchShape, FieldSpec, StagedInputs

FIELDS = (
    FieldSpec("token_ids", lambda bucket: bucket.query_len),
    FieldSpec("slots", lambda bucket: bucket.query_len, pad=77),
    FieldSpec("visible", lambda bucket: (bucket.query_len, bucket.num_shared_blocks)),
    FieldSpec("owner", lambda bucket: bucket.num_unique_blocks, pad=5),
)
LARGE = BatchShape.parse("csu/q64/s8/u32/l4")
SMALL = BatchShape.parse("--u/q3/s0/u7/l3")
NOTHING = {field.name: np.zeros([0] * len(field.dims(LARGE)), int) for field in FIELDS}


def arrays_for(bucket: BatchShape, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        field.name: rng.integers(0, 100, [rng.integers(0, size + 1) for size in field.dims(bucket)])
        for field in FIELDS
    }


@given(
    st.sampled_from(["c--", "cs-", "csu", "--u"]),
    st.integers(1, 64),
    st.integers(0, 8),
    st.integers(0, 32),
    st.integers(0, 2**31),
)
def test_device_fields_hold_the_arrays_in_their_leading_corner_and_pads_elsewhere(
    phase: str, query_len: int, num_shared: int, num_unique: int, seed: int
) -> None:
    staged = StagedInputs(FIELDS, [LARGE])
    for use in range(2):
        num_shared = num_shared if "s" in phase else 0
        num_unique = num_unique if "u" in phase else 0
        bucket = BatchShape.parse(f"{phase}/q{query_len}/s{num_shared}/u{num_unique}/l1")
        arrays = arrays_for(bucket, seed + use)
        staged.fill(bucket, arrays)
        tensors = staged.copy_in(bucket)
        assert list(tensors) == [field.name for field in FIELDS]
        for field in FIELDS:
            expected = torch.full(field.dims(bucket), field.pad, dtype=torch.int32)
            corner = np.ix_(*[range(size) for size in arrays[field.name].shape])
            expected.numpy()[corner] = arrays[field.name]
            assert torch.equal(tensors[field.name], expected)


def test_fields_start_at_aligned_addresses_and_do_not_overlap() -> None:
    staged = StagedInputs(FIELDS, [LARGE])
    for bucket in (LARGE, SMALL):
        host = staged.stage(bucket)
        device = staged.copy_in(bucket)
        slots = list(staged.layout(bucket).slots.values())
        assert all(before.stop <= after.offset for before, after in pairwise(slots))
        assert all(array.ctypes.data % 64 == 0 for array in host.values())
        assert all(tensor.data_ptr() % 64 == 0 for tensor in device.values() if tensor.numel())


def test_one_copy_moves_exactly_the_prefix_that_the_bucket_needs() -> None:
    staged = StagedInputs(FIELDS, [LARGE, SMALL])
    assert staged.capacity_bytes == staged.layout(LARGE).num_bytes == 4 * (64 + 64 + 64 * 8 + 32)
    staged.stage(SMALL)
    staged.copy_in(SMALL)
    # Fields of 3, 3, 0 and 7 items, of which the first two are followed by alignment.
    assert (staged.num_copies, staged.bytes_copied) == (1, 4 * (16 + 16 + 7))
    staged.stage(LARGE)
    staged.copy_in(LARGE)
    assert (staged.num_copies, staged.bytes_copied) == (2, 4 * (16 + 16 + 7) + staged.capacity_bytes)


def test_a_copy_leaves_device_memory_behind_the_prefix_alone() -> None:
    staged = StagedInputs(FIELDS, [LARGE])
    staged.fill(LARGE, NOTHING)
    device = staged.copy_in(LARGE)
    staged.stage(LARGE)["owner"][:] = 9
    staged.stage(SMALL)
    staged.copy_in(SMALL)
    assert device["owner"].tolist() == [5] * 32


def test_a_bucket_keeps_its_tensors_and_addresses_while_others_run() -> None:
    staged = StagedInputs(FIELDS, [LARGE])
    staged.stage(SMALL)
    first = staged.copy_in(SMALL)
    tensors = dict(first)
    addresses = {name: tensor.data_ptr() for name, tensor in first.items()}
    staged.stage(LARGE)
    staged.copy_in(LARGE)
    staged.stage(SMALL)
    again = staged.copy_in(SMALL)
    assert again is first
    assert all(again[name] is tensor for name, tensor in tensors.items())
    assert {name: tensor.data_ptr() for name, tensor in again.items()} == addresses


def test_addresses_outlive_the_cached_views_of_many_missed_shapes() -> None:
    staged = StagedInputs(FIELDS, [BatchShape.parse("--u/q2/s0/u2000/l1")])
    bucket = BatchShape.parse("--u/q2/s0/u2000/l1")
    staged.stage(bucket)
    before = staged.copy_in(bucket)["owner"].data_ptr()
    for num_unique in range(1500):
        staged.stage(BatchShape.parse(f"--u/q2/s0/u{num_unique}/l1"))
    staged.stage(bucket)
    assert staged.copy_in(bucket)["owner"].data_ptr() == before


def test_staging_leaves_what_an_earlier_step_wrote_and_filling_pads_it_over() -> None:
    staged = StagedInputs(FIELDS, [LARGE])
    staged.stage(SMALL)["slots"][:] = 1
    assert (staged.stage(SMALL)["slots"] == 1).all()
    staged.fill(SMALL, NOTHING)
    assert (staged.stage(SMALL)["slots"] == 77).all()


def test_views_written_in_place_reach_the_device() -> None:
    staged = StagedInputs(FIELDS, [LARGE])
    staged.stage(SMALL)["token_ids"][:] = [8, 9, 0]
    assert staged.copy_in(SMALL)["token_ids"].tolist() == [8, 9, 0]


def test_later_host_writes_do_not_change_what_was_copied() -> None:
    staged = StagedInputs(FIELDS, [LARGE])
    host = staged.stage(SMALL)
    device = staged.copy_in(SMALL)
    host["token_ids"][:] = 9
    assert device["token_ids"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("token_ids", np.zeros(4, int), r"'token_ids': expected a shape of at most \(3,\), got \(4,\)"),
        ("visible", np.zeros((1, 1), int), r"'visible': expected a shape of at most \(3, 0\), got \(1, 1\)"),
        ("token_ids", np.zeros((1, 3), int), r"expected a shape of at most \(3,\), got \(1, 3\)"),
        ("token_ids", np.zeros(3), "expected integers, got float64"),
        ("token_ids", np.array([1 << 31]), "expected int32 values, got values from 2147483648"),
        ("unknown", np.zeros(3, int), "expected fields .*unknown"),
    ],
)
def test_an_array_that_does_not_fit_its_field_is_refused_before_anything_is_staged(
    name: str, array: np.ndarray, message: str
) -> None:
    staged = StagedInputs(FIELDS, [LARGE])
    with pytest.raises(ValueError, match=message):
        staged.fill(SMALL, {**arrays_for(SMALL), name: array})
    with pytest.raises(ValueError, match="expected the bucket staged last"):
        staged.copy_in(SMALL)


def test_only_fields_of_size_zero_may_be_left_out() -> None:
    staged = StagedInputs(FIELDS, [LARGE])
    arrays = {name: array for name, array in arrays_for(SMALL).items() if name != "visible"}
    staged.fill(SMALL, arrays)
    del arrays["owner"]
    with pytest.raises(ValueError, match="expected fields"):
        staged.fill(SMALL, arrays)


def test_copying_another_bucket_than_the_staged_one_is_refused() -> None:
    staged = StagedInputs(FIELDS, [LARGE])
    staged.stage(LARGE)
    with pytest.raises(ValueError, match="staged last, csu/q64/s8/u32/l4, got --u/q3"):
        staged.copy_in(SMALL)


def test_a_bucket_larger_than_the_buffers_is_refused() -> None:
    with pytest.raises(ValueError, match="which needs 2688"):
        StagedInputs(FIELDS, [SMALL]).stage(LARGE)


def test_repeated_names_and_missing_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="unique field names"):
        StagedInputs((*FIELDS, FIELDS[0]), [LARGE])
    with pytest.raises(ValueError, match="at least one shape"):
        StagedInputs(FIELDS, [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fields_arrive_on_a_cuda_device() -> None:
    staged = StagedInputs(FIELDS, [LARGE], device="cuda")
    staged.stage(SMALL)["token_ids"][:] = [4, 5, 6]
    tensors = staged.copy_in(SMALL)
    assert tensors["token_ids"].is_cuda
    assert tensors["token_ids"].tolist() == [4, 5, 6]
