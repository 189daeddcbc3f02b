"""A transformers model that runs flattened steps over our stores."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpu_duo.modeling.attention import (
    LAYER_ATTRIBUTE,
    AttentionLayer,
    LayerKind,
    LiveRows,
    RowTensors,
    RunningStep,
    placeholder_mask,
)
from hpu_duo.modeling.latents import keep_latents
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.modeling.recurrent import RecurrentLayer, layers_besides
from hpu_duo.modeling.weight_stream import WeightStream
from hpu_duo.not_picklable import NotPicklable
from kernels_ref import LayerCache, LayerSpec, Recurrence, Step, WantedTokens, prepare_step, stores_of
from kernels_ref.loops import RegionOf
from kernels_ref.unified import Elsewhere
from kernels_ref.units import SCRATCH_STORES, KVUnits, UnitLayout, copy_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LayerRunner = Callable[..., Any]
_READ_S = 10.0
_CLIPPED = (
    "layer %d: %d elements of keys and %d of values of prompts are beyond the range of fp8 with this layer's "
    "scales, and are stored as its largest number: measure scales (hpu-duo calibrate --kv-scales), or choose "
    "kv_cache_dtype fp8_per_token_head"
)
_log = logging.getLogger(__name__)


def run_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """One decoder layer as its class wrote it: the region that backends may compile."""
    return type(layer).forward(layer, *args, **kwargs)


class ServedLayer(NotPicklable):
    """Replacement of a layer's ``forward``: calls the function that runs layers of its kind in this step.

    It has a weak reference to the layer, to avoid a cycle.

    Args:
        running: says whether layers of several steps take turns.
        arrive: called before, where the layer's weights are streamed.

    Attributes:
        enter: called before the layer's graph; None = nothing is.
    """

    def __init__(
        self,
        runners: Mapping[Hashable, LayerRunner],
        kind: Hashable,
        layer: nn.Module,
        running: RunningStep,
        arrive: Callable[[], None] | None = None,
    ) -> None:
        self._runners, self._kind, self._layer, self._arrive = runners, kind, weakref.ref(layer), arrive
        self._running = running
        self.enter: Callable[[], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (turn := self._running.turn) is not None:
            return turn(partial(self, *args, **kwargs))
        if self._arrive is not None:
            self._arrive()
        if self.enter is not None:
            self.enter()
        return self._runners.get(self._kind, run_layer)(self._layer(), *args, **kwargs)


class TrailingLayer(NotPicklable):
    """The same for a layer behind the last store, of which a step with prompts needs some tokens only."""

    def __init__(self, served: ServedLayer, running: RunningStep) -> None:
        self._served, self._running = served, running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self._running.step
        if step is None or step.wanted is None:
            return self._served(*args, **kwargs)
        some = partial(_of_tokens, num_tokens=len(step.tensors.positions), wanted=step.wanted.token)
        return self._served(*map(some, args), **{name: some(value) for name, value in kwargs.items()})


def _of_tokens(value: Any, num_tokens: int, wanted: torch.Tensor) -> Any:
    """Some tokens of an argument of a layer: ``[Q]``, ``[1, Q]`` or ``[..., Q, X]``, or a tuple of them."""
    if isinstance(value, tuple):
        return tuple(_of_tokens(each, num_tokens, wanted) for each in value)
    if not isinstance(value, torch.Tensor):
        return value
    dim = value.ndim - (1 if value.ndim < 3 else 2)
    return value.index_select(dim, wanted) if value.shape[dim] == num_tokens else value


class StepModel(NotPicklable):
    """The captured part of a step: tokens in, wanted logits out.

    Args:
        caches: stores of each layer.
        row_tensors: tensors of the row states of each layer; empty where no layer has any.
        recurrent: layers with states only, with kinds and tensors of their states.
        stream: of weights that lie on the host; None = all are on the device.

    Attributes:
        specs: attention of each layer.
        stores: the kinds of head groups of all layers, with the distinct layouts of their stores.
        mask_dtype: of ``prepare_step``.
        live: tells linears on a CPU which rows of a step are padding.
        kinds: distinct kinds of layers; layers of one kind run the same compiled region.
        prepare: ``prepare_step`` for the stores and states of all layers.
        recurrences: kinds of states of recurrences, one for each ``Recurrence.key``.
        running: the step that runs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[DecoderLayer],
        specs: Sequence[LayerSpec],
        caches: Sequence[LayerCache],
        live: LiveRows,
        row_tensors: Sequence[RowTensors] = (),
        scales: Sequence[tuple[float, float] | None] = (),
        recurrent: Sequence[tuple[RecurrentLayer, Sequence[Recurrence], RowTensors]] = (),
        stream: WeightStream | None = None,
    ) -> None:
        self.model, self.live, self.stream = model, live, stream
        self.specs = tuple(specs)
        # Layers that share stores have them once.
        self._caches = tuple(cache for spec, cache in zip(specs, caches) if spec.writes)
        self._attention: list[AttentionLayer] = []
        self._numbers = tuple(layer.number for layer in layers)
        self._num_clipped: dict[int, int] = {}
        self._read_at = -math.inf
        self._kv_scales = tuple(scales)
        self.running = RunningStep()
        self._runners: dict[Hashable, LayerRunner] = {}
        # Without it, transformers computes it in each step, as int64.
        self._takes_cache_position = "cache_position" in signature(model.forward).parameters
        self._mask = placeholder_mask(caches[0][0].tensors[0].device)
        kinds: dict[LayerKind, LayerKind] = {}
        served: dict[nn.Module, tuple[Hashable, ...]] = {}
        of_rows = row_tensors or [()] * len(caches)
        for layer, spec, cache, rows, of_kv in zip(
            layers, specs, caches, of_rows, scales or [None] * len(caches)
        ):
            latents = None
            if spec.stores_latents:
                latents = keep_latents(layer.attention, layer.call.num_heads, layer.call.value_head_dim)
            attention = AttentionLayer(spec, cache, self.running, rows, of_kv, latents)
            setattr(layer.attention, LAYER_ATTRIBUTE, attention)
            self._attention.append(attention)
            served[layer.module] = (spec,)
        self.recurrences = tuple({kind.key: kind for _, states, _ in recurrent for kind in states}.values())
        for each, states, tensors in recurrent:
            each.attach(states, tensors, self.running)
            served[each.module] = (*served.get(each.module, ()), *states)
        besides = layers_besides(model, served)
        # Layers that write nothing, and whose queries decide on nothing, behind all that do.
        writing = [
            number
            for number, spec in enumerate(specs)
            if spec.writes or spec.rows or any(group.kind.num_summed for group in spec.groups)
        ]
        num_writing = len(specs) if recurrent or besides else 1 + max(writing)
        trailing = {layer.module for layer in layers[num_writing:]}
        self._has_trailing = bool(trailing)
        of_module = {
            module: self._serve(module, served.get(module, ()), kinds, is_trailing=module in trailing)
            for module in (*served, *besides)
        }
        self._served = [of_module[layer.module] for layer in layers]
        self.kinds = tuple(kinds)
        self.stores = stores_of(specs, caches)
        self.mask_dtype = caches[0][0].encoding.dtype if specs[0].impl.reads_masks else None
        self.prepare = partial(
            prepare_step,
            stores=self.stores,
            mask_dtype=self.mask_dtype,
            recurrences=self.recurrences,
        )
        self._copies = tuple(_copies(self._caches))

    def _serve(
        self,
        layer: nn.Module,
        spec: Hashable,
        kinds: dict[LayerKind, LayerKind],
        *,
        is_trailing: bool = False,
    ) -> ServedLayer:
        """Let a layer run as one of its kind, and return what runs in place of it."""
        kind = LayerKind(layer, (spec, is_trailing) if is_trailing else spec)
        # Equal kinds become one object, which dictionaries find without comparing.
        kind = kinds.setdefault(kind, kind)
        arrive = None if self.stream is None else self.stream.arrival_of(layer)
        served = ServedLayer(self._runners, kind, layer, self.running, arrive)
        layer.forward = TrailingLayer(served, self.running) if is_trailing else served
        return served

    def attend_elsewhere(
        self, of_layers: Sequence[Elsewhere], enter: Callable[[int], None] | None = None
    ) -> None:
        """Let each layer attend to keys besides those of its stores too.

        Args:
            enter: called with the number of each such layer before its graph.
        """
        for layer, elsewhere in zip(self._attention, of_layers, strict=True):
            layer.elsewhere = elsewhere
        for number, served in enumerate(self._served):
            served.enter = None if enter is None else partial(enter, number)

    def num_clipped(self) -> int:
        """Count elements of keys and values of prompts that constant scales have clipped.

        A layer with some is warned of once. On devices other than a CPU the counts are read every ten
        seconds at most, since a read waits for the device.
        """
        layers = zip(self._numbers, self._attention)
        counting = {number: each for number, each in layers if each.counts_clipped}
        now = time.monotonic()
        is_due = self._mask.device.type == "cpu" or now - self._read_at > _READ_S
        if not counting or not is_due:
            return sum(self._num_clipped.values())
        self._read_at = now
        table = torch.stack([each.clipped for each in counting.values()]).tolist()
        for (number, layer), (keys, values) in zip(counting.items(), table):
            if not (keys or values):
                continue
            layer.clipped.zero_()
            if number not in self._num_clipped:
                _log.warning(_CLIPPED, number, keys, values)
            self._num_clipped[number] = self._num_clipped.get(number, 0) + keys + values
        return sum(self._num_clipped.values())

    @property
    def kv_scales(self) -> list[list[float] | None]:
        """The divisors of keys and values of each layer; None where they are stored as they are."""
        return [None if each is None else list(each) for each in self._kv_scales]

    @property
    def stores_flat(self) -> list[torch.Tensor]:
        """The stores of all layers, as lists of vectors."""
        return [flat for cache in self._caches for units in cache for flat in units.tensors]

    def copy_to_scratch(self, rows: torch.Tensor, region_of: RegionOf | None = None) -> None:
        """Copy the rows of prompts to where the layers read them, before a step.

        Args:
            rows: int32 ``[C]``.
            region_of: returns what runs the copies of some stores; None = as they are.
        """
        for layout, key, tensors in self._copies:
            run = copy_units if region_of is None else region_of(key, copy_units)
            run(layout, rows, *tensors)

    def logits(
        self,
        token_ids: torch.Tensor,
        step: Step,
        logit_index: torch.Tensor,
        runners: Mapping[Hashable, LayerRunner],
    ) -> torch.Tensor:
        """Run all layers over ``[Q]`` tokens and return the logits at ``logit_index``, ``[N, V]``.

        Args:
            runners: what runs the layers of each kind.
        """
        self._runners.clear()
        self._runners.update(runners)
        positions, keeps = step.tensors.positions, logit_index
        if self._has_trailing and step.parts.causal and len(keeps) < len(positions):
            step = step._replace(wanted=WantedTokens.of(step, logit_index))
            keeps = torch.arange(len(keeps), dtype=keeps.dtype, device=keeps.device)
        self.running.step = step
        try:
            output = self.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                **({"cache_position": positions} if self._takes_cache_position else {}),
                attention_mask=self._mask,
                use_cache=False,
                logits_to_keep=keeps,
            )
        finally:
            self.running.step = None
        return output.logits[0]


def _copies(caches: Sequence[LayerCache]) -> Iterator[tuple[UnitLayout, Hashable, list[torch.Tensor]]]:
    """Yield layout, key and tensors of each region that copies to the scratch: ``SCRATCH_STORES`` at most."""
    alike: dict[tuple[Hashable, ...], list[KVUnits]] = {}
    for units in (each for cache in caches for each in cache if each.scratch is not None):
        sizes = tuple((tuple(each.shape), each.dtype) for each in units.tensors)
        alike.setdefault((units.layout, sizes), []).append(units)
    for key, stores in alike.items():
        for begin in range(0, len(stores), SCRATCH_STORES):
            some = stores[begin : begin + SCRATCH_STORES]
            tensors = [tensor for units in some for tensor in units.tensors]
            tensors += [tensor for units in some for tensor in units.scratch or ()]
            yield some[0].layout, ("scratch", *key, len(some)), tensors
