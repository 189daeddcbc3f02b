"""The plan of an engine that follows from a model's layers and a configuration: kernels, stores, memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from graphs import CaptureBackend
from hpu_duo.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from hpu_duo.config.limits import DeviceBudget
from hpu_duo.heads import HeadPattern
from hpu_duo.heads.eviction import make_kv_policy
from hpu_duo.kv.plan import LayerKV, MemoryPlan, ring_slack, store_turns
from hpu_duo.kv.snapshots import default_snapshots, default_snapshots_within
from hpu_duo.kv.store import KVStore
from hpu_duo.modeling.attention import LiveRows
from hpu_duo.modeling.config_checks import fix_frequencies, positions_served, served_len, short_len
from hpu_duo.modeling.precision import Precision
from hpu_duo.modeling.probe import DecoderLayer, rotary_frequencies
from hpu_duo.modeling.recurrent import RecurrentLayer, recurrent_layers
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.modeling.weight_stream import WeightStream
from hpu_duo.startup.heads import ChosenHeads, HeadAssignment, choose_heads, kv_layers
from hpu_duo.startup.kv_budget import resolve_kv_budget
from hpu_duo.startup.kv_formats import scales_of, stored_cache, with_formats
from hpu_duo.startup.offloading import blocks_beside_host
from hpu_duo.startup.tables import StepTables
from kernels_ref import (
    Budget,
    FusedOperators,
    HeadGroup,
    Implementation,
    LayerSpec,
    Recurrence,
    Softmax,
    StoreTurn,
)
from kernels_ref.chunks import MOST_INLINE, ChunkBounds
from kernels_ref.hpu.attention import LINE_BYTES, NO_OPERATORS
from kernels_ref.hpu.trial import Trial, try_operators
from kernels_ref.triton import availability


def plan_memory(
    layers: tuple[DecoderLayer, ...],
    heads: Sequence[HeadAssignment],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_len: int,
    dtype: torch.dtype,
    *,
    budget: DeviceBudget,
    graph_bytes: int = 0,
    states: tuple[LayerKV, ...] = (),
) -> MemoryPlan:
    """Plan the sizes of all stores, within the engine's share of the device unless the user has set a size.

    Args:
        heads: of each layer.
        budget: of the device.
        graph_bytes: bytes that are set aside for graphs first.
        states: of layers without attention.

    Raises:
        ValueError: the user's size does not fit into the free memory, or no useful size into the share.
    """
    free_bytes = budget.free_bytes - graph_bytes
    kv = kv_layers(layers, heads) + states
    sizes: dict[str, Any] = {
        "dtype_bytes": dtype.itemsize,
        "block_size": cache.block_size,
        "max_num_seqs": scheduler.max_num_seqs,
        "graph_bytes": graph_bytes,
        "max_chunk_rows": scheduler.max_chunk_rows,
    }
    wanted = scheduler.max_num_seqs * -(-max_len // cache.block_size)
    snapshots = _Snapshots(cache, MemoryPlan(kv, num_blocks=wanted, **sizes))
    if cache.num_blocks is not None:
        return _fitting(snapshots.beside(MemoryPlan(kv, num_blocks=cache.num_blocks, **sizes)), free_bytes)
    if cache.kv_cache_bytes is not None:
        sizes["num_snapshots"] = snapshots.within(cache.kv_cache_bytes)
        plan = MemoryPlan.from_budget(kv, kv_cache_bytes=cache.kv_cache_bytes, **sizes)
        return _fitting(replace(plan, num_blocks=min(plan.num_blocks, wanted)), free_bytes)
    plan = snapshots.beside(MemoryPlan(kv, num_blocks=wanted, **sizes))
    kv_bytes = budget.kv_bytes(graph_bytes)
    if plan.total_bytes <= kv_bytes:
        return plan
    sizes["num_snapshots"] = snapshots.within(kv_bytes)
    try:
        return MemoryPlan.from_budget(kv, kv_cache_bytes=kv_bytes, **sizes)
    except ValueError as error:
        raise ValueError(
            f"{error}: that is what device_memory_utilization={budget.utilization:g} of "
            f"{budget.total_bytes} bytes leaves beside {budget.held_bytes} in use by this process, with "
            f"{budget.free_bytes} bytes free"
        ) from None


class _Snapshots:
    """Computes the number of snapshots of rings of a memory plan.

    Args:
        cache: settings of the user.
        plan: of the same layers.
    """

    def __init__(self, cache: CacheConfig, plan: MemoryPlan) -> None:
        self._asked = cache.num_prefix_snapshots
        if not (cache.enable_prefix_caching and plan.uses_rows):
            self._asked = 0
        self._row_bytes, self._max_num_seqs = plan.row_bytes, plan.max_num_seqs

    def beside(self, plan: MemoryPlan) -> MemoryPlan:
        """Add snapshots to a plan of other stores."""
        if self._asked is not None:
            return replace(plan, num_snapshots=self._asked)
        num = default_snapshots(plan.total_bytes, self._row_bytes, self._max_num_seqs)
        return replace(plan, num_snapshots=num)

    def within(self, kv_bytes: int) -> int:
        """Return the number of snapshots for a total size of all stores."""
        if self._asked is not None:
            return self._asked
        return default_snapshots_within(kv_bytes, self._row_bytes, self._max_num_seqs)


def _fitting(plan: MemoryPlan, free_bytes: int) -> MemoryPlan:
    if plan.total_bytes > free_bytes:
        raise ValueError(
            f"the KV cache needs {plan.total_bytes} bytes ({plan.num_blocks} blocks), "
            f"but only {max(0, free_bytes)} bytes are free"
            + (f" beside {plan.graph_bytes} bytes for graphs" if plan.graph_bytes else "")
        )
    return plan


def with_frequencies(
    model: PreTrainedModel, layers: Sequence[DecoderLayer], heads: Sequence[HeadAssignment]
) -> tuple[HeadAssignment, ...]:
    """Set the frequencies of heads with a budget, if their policy needs them.

    Raises:
        ValueError: the model has no plain rotary embedding in such a layer, or has no weights to try it with.
    """
    if not any(_needs_rotary(group) for each in heads for group in each.groups):
        return tuple(heads)
    name = type(model).__name__
    # Fake tensors name a device, but their storage is on none.
    if any(parameter.untyped_storage().device.type == "meta" for parameter in model.parameters()):
        raise ValueError(f"the rotary embedding of {name} is read from its weights, which are not there")
    found = rotary_frequencies(model, layers)
    served = []
    for index, (each, frequencies) in enumerate(zip(heads, found)):
        groups = tuple(_with(group, frequencies, f"{name}, layer {index}") for group in each.groups)
        served.append(each._replace(groups=groups))
    return tuple(served)


def _needs_rotary(group: HeadGroup) -> bool:
    return isinstance(group.kind, Budget) and group.kind.policy.needs_rotary


def _with(group: HeadGroup, frequencies: tuple[float, ...] | None, where: str) -> HeadGroup:
    if not _needs_rotary(group):
        return group
    assert isinstance(group.kind, Budget)
    if frequencies is None:
        raise ValueError(
            f"{where} is not served with kv_policy {group.kind.policy.name!r}, which turns queries: expected "
            "a plain rotary embedding, of the halves of a head against each other by fixed frequencies"
        )
    return replace(group, kind=replace(group.kind, frequencies=frequencies))


def request_len(config: EngineConfig, text_config: Any) -> int:
    """Return the longest request that an engine serves; see ``served_len``.

    Where all heads have positions in the cache, texts may be longer than those that the model was trained
    with: no distance is. Prompts that are read whole have the distances of the text.

    Raises:
        ValueError: see ``served_len``; or stored tokens and a chunk exceed the model's positions.
    """
    wanted = config.scheduler.max_model_len
    policy = None if config.cache.kv_policy is None else make_kv_policy(config.cache.kv_policy)
    is_bounded = policy is None or not policy.positions_in_cache
    is_whole, has_others = config.cache.kv_prompt == "whole", config.heads.pattern is not None
    sees_more = is_whole or has_others or short_len(text_config) is not None
    if wanted is None or is_bounded or sees_more or wanted <= positions_served(text_config):
        return served_len(text_config, wanted)
    budget, most = resolve_kv_budget(config, wanted), positions_served(text_config)
    assert budget is not None
    if budget.budget + budget.chunk > most:
        raise ValueError(
            f"expected kv_budget and kv_chunk of at most {most} tokens together, the positions that this "
            f"model serves, for max_model_len={wanted}, got {budget.budget} and {budget.chunk}"
        )
    return wanted


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChosenKernels:
    """The kernels that attend, and their choices; see ``LayerSpec``."""

    impl: Implementation
    softmax: Softmax = Softmax.EXACT
    operators: FusedOperators = NO_OPERATORS


def chunk_bounds(
    score_bytes: int, device: torch.device, impl: Implementation, memory_bytes: int | None = None
) -> ChunkBounds:
    """Return the bounds of chunks of context on a device.

    The loops of portable kernels would let graphs of accelerators grow with the context, so that only short
    ones are in them. Other implementations are operators, which have no loops in a graph. On an HPU chunks
    are as large as a share of the device allows, so that decodes of long contexts need no loop.

    Args:
        score_bytes: see ``ModelConfig``.
        impl: the kernels that attend.
        memory_bytes: of an HPU; None = bounds do not depend on it.
    """
    has_loops = device.type != "cpu" and impl in (Implementation.REFERENCE, Implementation.HPU)
    if has_loops and device.type == "hpu" and memory_bytes is not None:
        return ChunkBounds.of_hpu(memory_bytes, score_bytes)
    most_inline = MOST_INLINE if has_loops else None
    # Fused attention has masks instead of scores.
    return ChunkBounds(score_bytes=score_bytes, mask_bytes=score_bytes, most_inline=most_inline)


def choose_kernels(
    name: str,
    device: torch.device,
    layers: tuple[DecoderLayer, ...],
    dtype: torch.dtype = torch.float32,
    softmax: Softmax = Softmax.EXACT,
) -> ChosenKernels:
    """The implementation of the attention parts.

    Args:
        name: as configured, see ``ModelConfig.attention``.
        dtype: of the model.

    Raises:
        ValueError: "sdpa" for a device other than CPU, or for a model with soft-capped scores; "triton" where
            Triton cannot run, or for heads that its kernels do not support; "hpu" where no fused operator
            passes its trial; or fast softmax for kernels that have none.
    """
    if name == "auto":
        chosen = _best_kernels(device, layers, dtype, softmax)
    elif name == Implementation.HPU.value:
        chosen = _fused_kernels(device, layers, dtype, softmax)
    else:
        chosen = ChosenKernels(_asked_for(Implementation(name), device, layers), softmax)
    if softmax is Softmax.FAST and chosen.impl not in (Implementation.REFERENCE, Implementation.HPU):
        raise ValueError(
            f"softmax 'fast' is not available: attention {chosen.impl.value!r} computes scores in float32: "
            "expected softmax 'exact', or attention 'reference' or 'hpu'"
        )
    return chosen


def line_bytes(device: torch.device) -> int:
    """Return the cache lines of fused statistics on a device; see ``FusedOperators``."""
    # The name of a device ends with its number.
    return LINE_BYTES if str(torch.get_device_module(device).get_device_name()).endswith("3") else 0


def _asked_for(
    impl: Implementation, device: torch.device, layers: tuple[DecoderLayer, ...]
) -> Implementation:
    if impl is Implementation.TRITON:
        reason = _triton_problem(device, layers)
        if reason is not None:
            raise ValueError(f"attention 'triton' is not available: {reason}")
    if impl is Implementation.SDPA:
        if device.type != "cpu":
            raise ValueError(f"attention 'sdpa' is torch's CPU kernel, got device {str(device)!r}")
        if _has_softcap(layers):
            raise ValueError("attention 'sdpa' has no soft cap, which this model needs; expected 'reference'")
    return impl


def _best_kernels(
    device: torch.device, layers: tuple[DecoderLayer, ...], dtype: torch.dtype, softmax: Softmax
) -> ChosenKernels:
    if device.type == "cpu":
        impl = Implementation.REFERENCE if _has_softcap(layers) else Implementation.SDPA
        return ChosenKernels(impl, softmax)
    portable = ChosenKernels(Implementation.REFERENCE, softmax)
    if device.type == "hpu":
        trial = _try_fused(device, layers, dtype, softmax)
        if trial.operators.names:
            return ChosenKernels(Implementation.HPU, softmax, trial.operators)
        reason: str | None = "; ".join(trial.problems)
    elif device.type == "cuda":
        reason = _triton_problem(device, layers)
        if reason is None:
            return ChosenKernels(Implementation.TRITON, softmax)
    else:
        return portable
    _log.warning("attention runs on the portable implementation: %s", reason)
    return portable


def _has_softcap(layers: tuple[DecoderLayer, ...]) -> bool:
    return any(layer.call.softcap is not None for layer in layers)


def _triton_problem(device: torch.device, layers: tuple[DecoderLayer, ...]) -> str | None:
    calls = [layer.call for layer in layers]
    largest = max(max(call.head_dim, call.value_head_dim) for call in calls)
    served = availability.MAX_HEAD_DIM
    if largest > served:
        return f"its kernels serve head sizes of up to {served}, and this model has heads of {largest}"
    for call in calls:
        if call.latent is not None:
            return "its kernels read keys and values of each head, and this model stores latents"
        if call.value_head_dim != call.head_dim:
            return (
                f"its kernels serve keys and values of one size, and this model has keys of {call.head_dim} "
                f"and values of {call.value_head_dim} elements"
            )
    return availability.problem(device)


def _fused_kernels(
    device: torch.device, layers: tuple[DecoderLayer, ...], dtype: torch.dtype, softmax: Softmax
) -> ChosenKernels:
    if device.type != "hpu":
        raise ValueError(f"attention 'hpu' needs operators of a Gaudi, got device {str(device)!r}")
    trial = _try_fused(device, layers, dtype, softmax)
    problems = "; ".join(trial.problems)
    if not trial.operators.names:
        raise ValueError(f"attention 'hpu' is not available: none of its operators passes: {problems}")
    if problems:
        _log.warning("attention 'hpu' does without some of its operators: %s", problems)
    return ChosenKernels(Implementation.HPU, softmax, trial.operators)


def _try_fused(
    device: torch.device, layers: tuple[DecoderLayer, ...], dtype: torch.dtype, softmax: Softmax
) -> Trial:
    """A trial of the operators for heads of every size in a model."""
    calls = [layer.call for layer in layers]
    sizes = {(call.num_heads // call.num_kv_heads, call.head_dim, call.value_head_dim) for call in calls}
    lines = line_bytes(device)
    trials = [
        try_operators(device, dtype, group_size, key_dim, softmax, lines, value_dim)
        for group_size, key_dim, value_dim in sorted(sizes)
    ]
    return Trial.of_all(trials)


@dataclass(frozen=True)
class Blueprint:
    """Heads, kernels and stores of a model; needs neither weights nor a device.

    Attributes:
        config: of the engine.
        text_config: transformers' configuration of the text part.
        layers: of the model, in its own order of heads.
        device: where steps run.
        dtype: of activations, and of plain stores.
        max_len: tokens of a request.
        pattern: the binarised head pattern; None if all heads retrieve.
        own_pattern: that of this rank's heads, which is the same where no others share them.
        heads: order and groups of the heads of each layer.
        specs: attention of each layer.
        recurrent: layers with states only.
        kv_dtype: of stores with ``kv_cache_dtype="auto"``.
    """

    config: EngineConfig
    text_config: Any
    layers: tuple[DecoderLayer, ...]
    device: torch.device
    dtype: torch.dtype
    max_len: int
    pattern: HeadPattern | None
    own_pattern: HeadPattern | None
    heads: tuple[HeadAssignment, ...]
    specs: tuple[LayerSpec, ...]
    recurrent: tuple[RecurrentLayer, ...]
    kv_dtype: torch.dtype

    @classmethod
    def draw(
        cls,
        model: PreTrainedModel,
        layers: tuple[DecoderLayer, ...],
        config: EngineConfig,
        device: torch.device,
        kernels: ChosenKernels,
        chosen: ChosenHeads | None = None,
        memory_bytes: int | None = None,
        precision: Precision | None = None,
    ) -> Blueprint:
        """Choose the groups of heads of a model, and the kernels' parameters of its layers.

        Args:
            model: with fixed rotary frequencies, see ``fix_served_len``.
            layers: as probed, or as read without data.
            device: where steps will run.
            chosen: the groups, if they have been chosen.
            memory_bytes: of the device, used memory included; see ``chunk_bounds``.
            precision: None = the model's dtype for all.

        Raises:
            ValueError: the head pattern does not fit the model.
        """
        text_config = model.config.get_text_config()
        max_len = request_len(config, text_config)
        if chosen is None:
            chosen = choose_heads(config, layers, max_len, device)
        pattern, heads, own = chosen
        precision = precision or Precision.of(model.dtype)
        heads = with_frequencies(model, layers, heads)
        cache = stored_cache(config.cache, precision, heads, layers, kernels.impl)
        heads = with_formats(heads, layers, cache, precision.arithmetic, device)
        chunks = chunk_bounds(config.model.score_bytes, device, kernels.impl, memory_bytes)
        stored = kv_layers(layers, heads)
        specs = tuple(
            _layer_spec(*each, kernels, chunks) for each in zip(layers, stored, store_turns(stored))
        )
        return cls(
            *(config, text_config, layers, device, precision.arithmetic, max_len),
            *(pattern, own or pattern, heads, specs, recurrent_layers(model), precision.kv),
        )

    @property
    def _states(self) -> tuple[LayerKV, ...]:
        """States of layers without attention."""
        return tuple(LayerKV((), 0, rows=self._kinds_of(each)) for each in self.recurrent)

    def _kinds_of(self, layer: RecurrentLayer) -> tuple[Recurrence, ...]:
        scheduler = self.config.scheduler
        drafts = scheduler.speculation is not None and scheduler.speculation.method == "duo"
        return layer.states_in(self.dtype, ring_slack(scheduler.decode_len), drafts=drafts)

    def memory(
        self, budget: DeviceBudget, cache: CacheConfig | None = None, graph_bytes: int = 0
    ) -> MemoryPlan:
        """Plan the sizes of all stores.

        Args:
            budget: of the device.
            cache: limits of the stores; default: settings of the user.
            graph_bytes: set aside for graphs first.

        Raises:
            ValueError: see ``plan_memory``.
        """
        cache = replace(cache or self.config.cache, block_size=self.config.block_size)
        num_blocks = blocks_beside_host(self.config, self.memory_of(1, 0))
        if num_blocks is not None:
            wanted = self.config.scheduler.max_num_seqs * -(-self.max_len // self.config.block_size)
            cache = replace(cache, num_blocks=min(num_blocks, wanted))
        sizes = (cache, self.config.scheduler, self.max_len, self.dtype)
        try:
            plan = plan_memory(
                *(self.layers, self.heads, *sizes),
                budget=budget,
                graph_bytes=graph_bytes,
                states=self._states,
            )
        except ValueError as error:
            if num_blocks is None:
                raise
            policy, on_host = self.config.model.offload_policy, cache.cpu_attention
            raise ValueError(f"{error}: that is offload_policy={policy!r}, cpu_attention={on_host}") from None
        return replace(plan, full_dtype_bytes=self._full_dtype_bytes)

    def memory_of(self, num_blocks: int, num_snapshots: int) -> MemoryPlan:
        """Plan stores of so many blocks and snapshots, whether they fit or not."""
        scheduler = self.config.scheduler
        return MemoryPlan(
            kv_layers(self.layers, self.heads) + self._states,
            num_blocks=num_blocks,
            dtype_bytes=self.dtype.itemsize,
            block_size=self.config.block_size,
            max_num_seqs=scheduler.max_num_seqs,
            num_snapshots=num_snapshots,
            max_chunk_rows=scheduler.max_chunk_rows,
            full_dtype_bytes=self._full_dtype_bytes,
        )

    @property
    def _full_dtype_bytes(self) -> int | None:
        return None if self.kv_dtype == self.dtype else self.kv_dtype.itemsize

    def tables(self, backend: CaptureBackend, *, is_padding: bool) -> StepTables:
        """Limits and buckets, as a function of the memory plan."""
        sizes = (self.text_config, self.max_len)
        recurrences = [kind for each in self.recurrent for kind in self._kinds_of(each)]
        return StepTables(self.config, self.specs, *sizes, backend, self.device, is_padding, recurrences)

    def build(
        self, model: PreTrainedModel, memory: MemoryPlan, live: LiveRows, stream: WeightStream | None = None
    ) -> tuple[KVStore, StepModel]:
        """Allocate the stores, and attach them to the model; heads are in the order of their groups.

        Args:
            stream: of weights on the host.
        """
        store = KVStore(memory, self.dtype, self.device)
        numbers = [layer.number for layer in self.layers]
        scales = scales_of(self.config.model.path, self.specs, memory.layers, numbers, self.config.cache)
        num = len(self.layers)
        states = [self._kinds_of(each) for each in self.recurrent]
        recurrent = tuple(zip(self.recurrent, states, store.row_tensors[num:], strict=True))
        parts = (store.layers[:num], live, store.row_tensors[:num], scales, recurrent, stream)
        return store, StepModel(model, self.layers, self.specs, *parts)


def fix_served_len(model: PreTrainedModel, config: EngineConfig) -> None:
    """Fix rotary frequencies that depend on a text's length to those of the longest request.

    Raises:
        ValueError: the model does not serve ``max_model_len``.
    """
    fix_frequencies(model, request_len(config, model.config.get_text_config()))


def _layer_spec(
    layer: DecoderLayer, kv: LayerKV, turn: StoreTurn, kernels: ChosenKernels, chunks: ChunkBounds
) -> LayerSpec:
    """Return the kernels' description of a layer of grouped heads."""
    return LayerSpec(
        groups=kv.groups,
        group_size=layer.call.num_heads // layer.call.num_kv_heads,
        head_dim=layer.call.head_dim,
        scale=layer.call.scale,
        softcap=layer.call.softcap,
        impl=kernels.impl,
        softmax=kernels.softmax,
        operators=kernels.operators,
        chunks=chunks,
        rows=kv.rows,
        turn=turn,
        value_head_dim=layer.call.value_head_dim,
    )
