"""Kinds of head groups, one file each; ``GroupKind`` is their interface."""

from kernels_ref.groups.blocks import Blocks, ChosenBlocks, ChosenStep
from kernels_ref.groups.budget import Budget, BudgetStep
from kernels_ref.groups.kind import (
    GroupKind,
    HeadGroup,
    HeadSizes,
    Owner,
    PartSizes,
)
from kernels_ref.groups.kv_policy import FutureQueries, KVPolicy, SlotView, TokenClass
from kernels_ref.groups.latents import LatentBlocks, LatentKV, LatentRings, LatentSize
from kernels_ref.groups.quest import QuestBlocks
from kernels_ref.groups.rings import Rings
from kernels_ref.groups.whole_prompts import WholePrompts
from kernels_ref.step import BlockStep, PartInputs, RingStep

__all__ = [
    "BlockStep",
    "Blocks",
    "Budget",
    "BudgetStep",
    "ChosenBlocks",
    "ChosenStep",
    "FutureQueries",
    "GroupKind",
    "HeadGroup",
    "HeadSizes",
    "KVPolicy",
    "LatentBlocks",
    "LatentKV",
    "LatentRings",
    "LatentSize",
    "Owner",
    "PartInputs",
    "PartSizes",
    "QuestBlocks",
    "RingStep",
    "Rings",
    "SlotView",
    "TokenClass",
    "WholePrompts",
]
