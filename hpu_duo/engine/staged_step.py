"""A step whose one input is the staging buffer, for devices that compile what they run.

Such a device may compile a layer again for views at other offsets, so layers take no views of the buffer. A
region of its own derives from the buffer, once a step, the tensors that all layers need; another one copies
the rows that prompts read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import torch

from graphs import BatchShape, Layout
from hpu_duo.engine.batch import StepGeometry
from hpu_duo.modeling.step_model import StepModel
from kernels_ref import Step, StepParts, StepTensors, prepare_step
from kernels_ref.loops import RegionOf, in_regions

STAGED = "staged"
"""Name of the step's one input."""

Prepared: TypeAlias = tuple[
    torch.Tensor, torch.Tensor, StepTensors, torch.Tensor, torch.Tensor, tuple[Any, ...]
]
"""Token ids, index of logits, and what a ``Step`` is made of; plans in the order of the model's stores."""


def staged_step(
    model: StepModel,
    geometry: StepGeometry,
    bucket: BatchShape,
    layout: Layout,
    runners: Mapping[Hashable, Callable[..., Any]],
    region_of: RegionOf,
) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    """Return the function that is captured for a bucket: from the staging buffer to logits ``[N * M, V]``.

    Args:
        layout: places of the bucket's arrays in the buffer.
        runners: functions that run the layers of each kind of ``model.kinds``.
        region_of: returns what runs a region.
    """
    parts = StepParts(bucket.phase.causal, bucket.phase.shared, bucket.phase.unique)
    prepare = region_of(("prepare",), _preparing(model, geometry, layout, parts))
    keys = [(kind.key, layout) for kind, layouts in model.stores.items() for layout in layouts]

    def step(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        token_ids, logit_index, tensors, token, slot, plans = prepare(inputs[STAGED])
        if parts.causal and parts.shared:
            model.copy_to_scratch(tensors.chunk_row, region_of)
        prepared = Step(parts, tensors, geometry.decode_len, token, slot, dict(zip(keys, plans)))
        with in_regions(region_of):
            return model.logits(token_ids, prepared, logit_index, runners)

    return step


def _preparing(
    model: StepModel, geometry: StepGeometry, layout: Layout, parts: StepParts
) -> Callable[[torch.Tensor], Prepared]:
    """Return a function of the staging buffer."""
    places = tuple((name, slot.offset, slot.stop, slot.shape) for name, slot in layout.slots.items())
    wanted = ("token_ids", "logit_index", *StepTensors._fields)
    decode_len, stores = geometry.decode_len, model.stores

    def prepare(staged: torch.Tensor) -> Prepared:
        # Copies: a view of the buffer would be an input of every layer.
        fields = {
            name: staged[begin:end].view(shape).clone()
            for name, begin, end, shape in places
            if name in wanted
        }
        tensors = StepTensors(**{name: fields[name] for name in StepTensors._fields})
        step = prepare_step(parts, tensors, decode_len=decode_len, stores=stores)
        plans = tuple(step.plans.values())
        return fields["token_ids"], fields["logit_index"], tensors, step.row_token, step.decode_slot, plans

    return prepare
