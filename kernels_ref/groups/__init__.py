"""Kinds of head groups, a file each; see ``GroupKind`` for what one has to say."""

from kernels_ref.groups.blocks import Blocks, BlockStep
from kernels_ref.groups.kind import GroupInputs, GroupKind, HeadGroup, Owner
from kernels_ref.groups.rings import Rings, RingStep
from kernels_ref.groups.transients import HeadSizes, PartSizes

__all__ = [
    "BlockStep",
    "Blocks",
    "GroupInputs",
    "GroupKind",
    "HeadGroup",
    "HeadSizes",
    "Owner",
    "PartSizes",
    "RingStep",
    "Rings",
]
