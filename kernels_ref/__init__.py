"""Attention as partial triples: reference implementations and the composition of one layer."""

from kernels_ref.formats import PLAIN, KVFormat
from kernels_ref.groups import (
    Blocks,
    Budget,
    ChosenBlocks,
    FutureQueries,
    GroupKind,
    HeadGroup,
    KVPolicy,
    Owner,
    Rings,
    SlotView,
    TokenClass,
    WholePrompts,
)
from kernels_ref.hpu.attention import FusedOperators
from kernels_ref.impl import Implementation
from kernels_ref.partial import FLOOR, Partial, Scoring, Softmax, empty, merge, normalise
from kernels_ref.rows import RowKind, RowTensor
from kernels_ref.step import Step, StepParts, StepTensors
from kernels_ref.unified import LayerCache, LayerSpec, prepare_step, stores_of, unified_attention
from kernels_ref.units import (
    Encoding,
    KVRecord,
    KVUnits,
    NewKV,
    PromptRegions,
    Scratch,
    SlotState,
    UnitLayout,
    as_units,
    copy_to_scratch,
    of_stores,
)

__all__ = [
    "FLOOR",
    "PLAIN",
    "Blocks",
    "Budget",
    "ChosenBlocks",
    "Encoding",
    "FusedOperators",
    "FutureQueries",
    "GroupKind",
    "HeadGroup",
    "Implementation",
    "KVFormat",
    "KVPolicy",
    "KVRecord",
    "KVUnits",
    "LayerCache",
    "LayerSpec",
    "NewKV",
    "Owner",
    "Partial",
    "PromptRegions",
    "Rings",
    "RowKind",
    "RowTensor",
    "Scoring",
    "Scratch",
    "SlotState",
    "SlotView",
    "Softmax",
    "Step",
    "StepParts",
    "StepTensors",
    "TokenClass",
    "UnitLayout",
    "WholePrompts",
    "as_units",
    "copy_to_scratch",
    "empty",
    "merge",
    "normalise",
    "of_stores",
    "prepare_step",
    "stores_of",
    "unified_attention",
]
