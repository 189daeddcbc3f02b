"""One step as plain data: all that the device side needs besides weights and stores.

An executor with the same weights and stores that has executed the same messages before gives the same tokens,
in another process too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphs import BatchShape
from hpu_duo.engine.batch import StepGeometry
from hpu_duo.kv.copies import CopyLists, padded_size
from hpu_duo.sampling import SamplingBatch

BLOCK_COPIES = "block_copies"
"""Name of a field of the integers, like the next constant."""
ROW_COPIES = "row_copies"


@dataclass(frozen=True, eq=False)
class StepMessage:
    """A step, padded to its bucket; plain data, see ``hpu_duo.device.plain``.

    Attributes:
        shape, bucket: the exact shape and the one it was padded to.
        ints: int32, the arrays of ``message_fields`` one after the other: copies within the stores, and the
            step itself.
        num_block_copies, num_row_copies: how many of the copies in ``ints`` to carry out before the step
            writes anything, padding included; the rest of ``ints`` is undefined.
        sampling: parameters of sampling, with one float32 array, and one int32 array of masks if a row has a
            grammar; None samples nothing.
        sampled: rows of logits whose tokens are returned, int32 ``[S]``, in order.
        hosted: rows of logits whose tokens are chosen on the host, so that logits are copied there.
    """

    shape: BatchShape
    bucket: BatchShape
    ints: npt.NDArray[np.int32]
    num_block_copies: int
    num_row_copies: int
    sampling: SamplingBatch | None
    sampled: npt.NDArray[np.int32]
    hosted: tuple[int, ...] = ()


def message_fields(geometry: StepGeometry, bucket: BatchShape) -> dict[str, tuple[int, ...]]:
    """Shape of every array among a message's integers, by name.

    Copies come first, so that they lie at the same places in every bucket: a device that compiles operators
    may tell views by their offsets.
    """
    most = most_copies(geometry)
    return {BLOCK_COPIES: (2, most), ROW_COPIES: (2, most), **geometry.field_shapes(bucket)}


def most_copies(geometry: StepGeometry) -> int:
    """Return the most blocks, and as many rows, that may be copied in a step.

    A row is copied to when it moves, when a sample forks or when a prefix is taken up, and a snapshot when it
    is taken. A fork copies a block as well, and a block that moves may exchange its content with another.
    """
    return geometry.trash_row + 2 * geometry.max_block_moves


def write_copies(
    fields: Mapping[str, npt.NDArray[np.int32]], copies: CopyLists, geometry: StepGeometry
) -> tuple[int, int]:
    """Write copies into their fields, padded by copies of trash; returns the padded numbers of both kinds.

    The rest of the fields is not read.
    """
    return (
        _write(fields[BLOCK_COPIES], copies.blocks, geometry.trash_block),
        _write(fields[ROW_COPIES], copies.rows, geometry.trash_row),
    )


def _write(field: npt.NDArray[np.int32], copies: npt.NDArray[np.int32], trash: int) -> int:
    num_copies = copies.shape[1]
    if not num_copies:
        return 0
    size = padded_size(num_copies, field.shape[1])
    field[:, :num_copies] = copies
    field[:, num_copies:size] = trash
    return size
