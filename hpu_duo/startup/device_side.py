"""The device side of an engine: its place, weights, stores, buckets and the runner."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from graphs import BucketTable, CaptureBackend, GraphCache, MissPolicy, StepLimits, make_backend
from graphs.backends import CHOSEN_LATER, chosen_name
from graphs.backends.base import WholeStepBackend
from graphs.backends.replay import ReplayBackend
from graphs.buffers import pack
from hpu_duo.config.engine import EngineConfig
from hpu_duo.config.limits import DeviceBudget
from hpu_duo.device import DeviceRuntime, own_device, resolve_device, runtime_for
from hpu_duo.device.ranks import Membership, WorkerRanks
from hpu_duo.engine.executor import Executor
from hpu_duo.engine.model_drafts.mtp import MtpSteps
from hpu_duo.engine.model_drafts.steps import DraftSteps, OwnStores
from hpu_duo.engine.step_input import message_fields
from hpu_duo.engine.stepper import Runner
from hpu_duo.heads import permute_heads
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.kv.store import KVStore
from hpu_duo.modeling.attention import LiveRows
from hpu_duo.modeling.experts import stacked_weights
from hpu_duo.modeling.fused_modules import fuse_modules
from hpu_duo.modeling.hpu_forms import use_hpu_forms
from hpu_duo.modeling.latents import keep_latents
from hpu_duo.modeling.mtp import keep_hidden
from hpu_duo.modeling.packed_linear import (
    can_pack,
    code_bytes,
    leave_files,
    pack_linears,
    plain_bytes,
    return_memory,
)
from hpu_duo.modeling.precision import Precision, name_of, widen
from hpu_duo.modeling.probe import DecoderLayer
from hpu_duo.modeling.quantised.checkpoint import quantisation_of
from hpu_duo.modeling.quantised.execution import PUBLISHED, separate_rounded_inputs, use_kernels
from hpu_duo.modeling.quantised.state import quantised_layers
from hpu_duo.modeling.recurrent import layers_besides
from hpu_duo.modeling.row_fusion import arrange
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.modeling.weight_stream import WeightStream, buffer_numbers, mover_for, weight_bytes
from hpu_duo.parallel import SpreadLogits, StepExchanges, Sums, connect
from hpu_duo.parallel.mixers import check_gates
from hpu_duo.startup.blueprint import Blueprint, ChosenKernels, choose_kernels
from hpu_duo.startup.draft_model import DraftModel, check_stores, draft_fields, within
from hpu_duo.startup.heads import ChosenHeads
from hpu_duo.startup.offloading import (
    CUT,
    bucket_bytes,
    check_runner,
    host_link,
    is_in_memory,
    link_bytes,
    offload_placement,
    runner_of,
    streamed_layers,
)
from hpu_duo.startup.tables import StepTables, plan_with_graphs
from kernels_ref import Implementation, LayerSpec, Owner, Softmax
from kernels_ref.formats.trial import format_problem
from kernels_ref.x86 import library as x86


@dataclass(frozen=True)
class Place:
    """The acquired device of an engine.

    Attributes:
        device: where steps run.
        runtime: of the device.
        backend: captures steps there.
        loads_on_host: whether weights are read to the host, of which a part stays there.
    """

    device: torch.device
    runtime: DeviceRuntime
    backend: CaptureBackend
    loads_on_host: bool = False

    @classmethod
    def of(cls, config: EngineConfig, rank: int = 0) -> Place:
        """Acquire the device of a configuration.

        Args:
            rank: of this process, if several share a model.

        Raises:
            ValueError: the device is not usable, or the capture backend cannot capture steps on it; nothing
                falls back to another one.
        """
        lazy = lazy_mode(config)
        device = resolve_device(config.model.device, lazy)
        if config.parallel.tensor_parallel_size > 1:
            device = own_device(device, rank)
        runtime = runtime_for(device, lazy)
        backend = _backend(config, device, runtime)
        check_runner(config, device, backend.name)
        offload_placement(config.model)  # refused before weights are read, as the next
        if not config.model.offloads_weights:
            return cls(device, runtime, backend)
        mover_for(runtime, device)
        if isinstance(backend, WholeStepBackend):
            raise ValueError(
                f"weights on the host are copied between layers, and graphs={backend.name!r} records whole "
                "steps on the device: expected graphs='compile' or 'eager' with weights on the host"
            )
        return cls(device, runtime, backend, loads_on_host=True)

    @property
    def fuses_rows(self) -> bool:
        """Whether steps will run fused elementwise programs, if their interpreter can be built."""
        return isinstance(self.backend, ReplayBackend) and self.backend.arrange is arrange

    @property
    def first_device(self) -> torch.device:
        """The device to probe a model on: the host, if the device would compile every operator, or where
        weights stay there."""
        is_host = self.runtime.compiles_operators or self.loads_on_host
        return torch.device("cpu") if is_host else self.device


def lazy_mode(config: EngineConfig) -> bool | None:
    """Return the mode of HPU that the capture backend needs; None if the user's environment decides."""
    backend = config.graph.backend
    name = backend if isinstance(backend, str) else backend.name
    return {"hpu-graph": True, "hpu-compile": False}.get(name)


def _backend(config: EngineConfig, device: torch.device, runtime: DeviceRuntime) -> CaptureBackend:
    chosen = config.graph.backend
    own = runtime.own_backend()
    if own is not None and isinstance(chosen, str):
        if chosen not in ("eager", *CHOSEN_LATER):
            raise ValueError(f"device {runtime.name!r} captures steps in its own way, got graphs={chosen!r}")
        return own
    if isinstance(chosen, str):
        on_host = config.cache.cpu_attention is not None and device.type != "hpu"
        if chosen in CHOSEN_LATER and (config.model.offload_num_batches > 1 or on_host):
            chosen = "eager"
        chosen = _make_backend(chosen_name(chosen, device.type, runtime.is_lazy))
    problem = chosen.problem(device)
    if problem is not None:
        raise ValueError(f"graphs={chosen.name!r} cannot be used: {problem}")
    return chosen


def _make_backend(name: str) -> CaptureBackend:
    return ReplayBackend(arrange) if name == "replay" else make_backend(name)


_log = logging.getLogger(__name__)

_GIB = 1 << 30
_ROW_BYTES = 256
"""Room in a message for the sampling parameters of a row."""
_MESSAGE_BYTES = 1 << 13
"""Bytes of the rest of a message: shapes, names and sizes."""


@dataclass(frozen=True)
class Shared:
    """The other ranks, where several share a model.

    Attributes:
        membership: this rank among the others.
        hf_config: transformers' configuration of the whole model.
        sums: where ranks sum.
        followers: the others, if this is rank 0.
    """

    membership: Membership
    hf_config: Any
    sums: Sums
    followers: WorkerRanks | None = None


@dataclass(frozen=True)
class DeviceSide:
    """All that steps need on a device.

    Attributes:
        runner: runs them.
        blueprint: of the engine.
        limits: of steps.
        hf_config: transformers' configuration of the whole model, also where ranks share it.
    """

    runner: Runner
    blueprint: Blueprint
    limits: StepLimits
    hf_config: Any

    @classmethod
    def build(
        cls,
        model: PreTrainedModel,
        layers: tuple[DecoderLayer, ...],
        config: EngineConfig,
        place: Place,
        chosen: ChosenHeads | None = None,
        shared: Shared | None = None,
        precision: Precision | None = None,
    ) -> DeviceSide:
        """Build it around a model in memory, which is changed in place; see ``assemble_around``.

        Args:
            layers: of the model, as probed.
            chosen: groups of heads, if they have been chosen; the model's heads are then in their order.
            shared: the other ranks, if the model is one rank's share.
            precision: None = the model's dtype for all.

        Raises:
            ValueError: the configuration does not fit the model or this machine.
            RankError: ranks differ.
        """
        device, runtime = place.device, place.runtime
        softmax = Softmax(config.model.softmax)
        precision = _served(model, precision or Precision.of(model.dtype), config)
        kernels = choose_kernels(config.model.attention, device, layers, precision.arithmetic, softmax)
        blueprint = Blueprint.draw(
            model, layers, config, device, kernels, chosen, runtime.total_bytes(), precision
        )
        draft = None
        if (speculation := config.scheduler.speculation) is not None and speculation.has_own_stores:
            whole = model.config if shared is None else shared.hf_config
            draft = DraftModel.load(config, model, blueprint, whole, precision, place)
        coming: list[nn.Module] = [model] if draft is None else [model, draft.own_modules]
        num_coming = 0 if place.first_device == device else sum(map(_weight_bytes, coming))
        streamed, on_disk = streamed_layers(config.model, _in_order(model, layers, blueprint))
        if num_coming and streamed:
            sizes = list(map(weight_bytes, streamed))
            num_buffers = max(buffer_numbers(len(sizes), config.model.offload_prefetch_step)) + 1
            num_coming -= max(0, sum(sizes) - num_buffers * max(sizes))
        one_block, cut = blueprint.memory_of(1, 1), _cut(blueprint, place.backend)
        num_coming += link_bytes(config, one_block, runtime, blueprint.max_len, cut)
        budget = _budget(config, runtime, num_coming)
        tables = blueprint.tables(place.backend, is_padding=runtime.compiles_operators)
        if config.scheduler.trim_chunks and not tables.uses_table:  # refused before weights are packed
            raise ValueError(
                "trim_chunks needs a table of buckets to trim to: expected graphs other than 'eager', or "
                "buckets"
            )
        memory = _plan_memory(blueprint, budget, tables, draft)
        if shared is not None:
            memory = _agreed(memory, blueprint, tables, shared)
        if chosen is None:
            layouts = [each.layout for each in blueprint.heads]
            check_gates([layer for layer, each in zip(layers, layouts) if not each.is_identity])
            permute_heads(
                [layer.attention for layer in layers],
                layouts,
                [layer.call.head_dim for layer in layers],
                [layer.call.value_head_dim for layer in layers],
            )
        _fit_modules(coming, layers, blueprint, kernels)
        live = LiveRows()
        if shared is not None:
            # Before packing: packed linears are no linears, by which the modules to sum over ranks are found.
            connect(model, shared.sums, shared.membership.ranks, shared.membership.group)
        _pack(config, model, layers, place, live, precision)
        stream = None
        if streamed:
            mover, ahead = mover_for(runtime, device), config.model.offload_prefetch_step
            folder = None if (disk := config.model.offload_disk) is None else Path(disk)
            if folder is not None and is_in_memory(folder):
                _log.warning(
                    "offload_disk=%s is in memory (tmpfs), so weights there take host memory", folder
                )
            stream = WeightStream(streamed, device, mover, ahead, folder, on_disk)
        runtime.place(model)
        if draft is not None:
            draft.own_modules.to(dtype=precision.arithmetic)
            runtime.place(draft.own_modules)
        _try_formats(blueprint)
        store, step_model = blueprint.build(model, memory, live, stream)
        limits = tables.limits(memory)
        drafts = _drafts(config, step_model, tables, memory, place, draft)
        executor = _make_executor(config, step_model, store, tables, runtime, shared, drafts)
        hf_config = model.config if shared is None else shared.hf_config
        vocab_size = hf_config.get_text_config().vocab_size
        runner = runner_of(config, executor, vocab_size, limits, blueprint.max_len)
        runner.builder.drafts = None if drafts is None else drafts.tables
        return cls(runner, blueprint, limits, hf_config)


def _fit_modules(
    models: Sequence[nn.Module],
    layers: tuple[DecoderLayer, ...],
    blueprint: Blueprint,
    kernels: ChosenKernels,
) -> None:
    """Exchange what layers compute with, in place, before packing: packed linears do not split.

    Args:
        models: the served one and what drafts for it.
    """
    for layer, spec in zip(layers, blueprint.specs):
        if spec.stores_latents:
            keep_latents(layer.attention, layer.call.num_heads, layer.call.value_head_dim)
    if blueprint.device.type == "hpu":
        for each in models:
            use_hpu_forms(each)
    if kernels.impl is Implementation.HPU:
        fused = fuse_modules(models[0], [layer.attention for layer in layers], blueprint.device)
        _log.info("by fused operators: %s", ", ".join((*kernels.operators.names, *fused)))


def _try_formats(blueprint: Blueprint) -> None:
    """Raise ValueError unless the device stores keys and values in the formats of the model."""
    device, dtype = blueprint.device, blueprint.dtype
    specs = blueprint.specs
    stored = {(group.format, spec.head_dim, spec.value_dim) for spec in specs for group in spec.groups}
    for kv_format, key_dim, value_dim in stored:
        problem = format_problem(kv_format, key_dim, value_dim, dtype, device)
        if problem is not None:
            raise ValueError(f"kv_cache_dtype {kv_format.name!r} is not available on {device}: {problem}")


def _agreed(memory: MemoryPlan, blueprint: Blueprint, tables: StepTables, shared: Shared) -> MemoryPlan:
    """Return the plan with the fewest blocks and snapshots of any rank, for equal steps on all ranks."""
    membership = shared.membership
    plans: list[MemoryPlan] = membership.collect(memory)
    # A rank without heads that need them fits any number.
    with_blocks = [plan for plan in plans if plan.uses_blocks] or plans
    memory = replace(
        memory,
        num_blocks=min(plan.num_blocks for plan in with_blocks),
        num_snapshots=min((plan.num_snapshots for plan in plans if plan.uses_rows), default=0),
        others=tuple(plan.layers for rank, plan in enumerate(plans) if rank != membership.ranks.rank),
    )
    membership.compare("limits of steps", tables.limits(memory))
    tables.adopt(memory, membership.collect(tables.table(memory))[0])
    # Where blocks are dealt, ranks have unequal numbers of the heads that stream, under a plan of all heads.
    config = blueprint.config
    is_context_parallel, is_planned = config.parallel.deals_blocks, config.cache.kv_plan is not None
    kept = tuple(
        (group.kind, group.kind.num_kept(group.num_heads))
        for spec in blueprint.specs
        for group in spec.groups
        if not (is_context_parallel or is_planned)
        or (is_context_parallel and group.kind.owner is Owner.BLOCK)
    )
    membership.compare("groups of heads", kept)
    membership.compare("bounds of chunks", blueprint.specs[0].chunks)
    membership.compare("states of rows", tuple(spec.rows for spec in blueprint.specs))
    return memory


def _cut(blueprint: Blueprint, backend: CaptureBackend) -> tuple[LayerSpec, ...]:
    """Layers whose graphs are cut where ``cpu_attention`` meets them."""
    return tuple(blueprint.specs) if backend.name in CUT else ()


def _plan_memory(
    blueprint: Blueprint, budget: DeviceBudget, tables: StepTables, draft: DraftModel | None
) -> MemoryPlan:
    """Plan the stores after reserving memory for graphs, which is configured or estimated.

    Args:
        draft: a model that drafts, which has a share of the memory of blocks.
    """
    share = 1.0 if draft is None else draft.share_of(blueprint)
    asked, cache = blueprint.config.graph.memory_bytes, blueprint.config.cache
    if share < 1:
        budget = within(budget, share)
        if cache.kv_cache_bytes is not None:
            cache = replace(cache, kv_cache_bytes=int(share * cache.kv_cache_bytes))
    if asked is not None and cache.cpu_attention is None:
        return blueprint.memory(budget, cache, graph_bytes=asked)
    bound, dtype_bytes = budget.graph_bytes(), blueprint.dtype.itemsize
    speculation = blueprint.config.scheduler.speculation

    def needed_of(plan: MemoryPlan) -> int:
        drafts = None
        if speculation is not None and speculation.is_by_model:
            own = None if draft is None else (draft.blueprint.specs, draft.blueprint.text_config)
            drafts = draft_fields(speculation, tables, plan), own
        of_states = 0
        if draft is not None and draft.is_of_checkpoint:
            of_states = draft.states(tables.largest(plan), plan.num_blocks, torch.device("meta")).num_bytes
        return tables.graph_bytes(plan, dtype_bytes, drafts) + of_states

    def set_aside(plan: MemoryPlan) -> int:
        beside = bucket_bytes(blueprint.config, _cut(blueprint, tables.backend), tables.largest(plan))
        return (min(bound, needed_of(plan)) if asked is None else asked) + beside

    plan = plan_with_graphs(
        lambda graph_bytes: blueprint.memory(budget, cache, graph_bytes=graph_bytes), set_aside
    )
    if asked is None and (needed := needed_of(plan)) > bound:
        _log.warning(
            "graphs may keep %.1f GiB if each has intermediates of its own, and %.1f GiB are reserved: fewer "
            "buckets keep less, and graph_memory_bytes reserves more",
            needed / _GIB,
            bound / _GIB,
        )
    return plan


def _served(model: PreTrainedModel, precision: Precision, config: EngineConfig) -> Precision:
    """Return the precision, or one dtype for all where weights cannot be packed; the model has it then."""
    if not precision.is_mixed:
        return precision
    if config.model.pack_weights is not False and x86.is_available(precision.arithmetic):
        return precision
    model.to(dtype=precision.arithmetic)  # type: ignore[call-arg]
    return Precision.of(precision.arithmetic)


def _pack(
    config: EngineConfig,
    model: PreTrainedModel,
    layers: tuple[DecoderLayer, ...],
    place: Place,
    live: LiveRows,
    precision: Precision,
) -> None:
    dtype, device = precision.weights, place.device
    wanted, is_cpu = config.model.pack_weights, device.type == "cpu"
    # Torch's product of plain float32 weights is the default: panels add the products in another order.
    packs_floats = bool(wanted) and is_cpu and dtype == torch.float32 and x86.is_available(dtype)
    arithmetic = precision.arithmetic if precision.is_mixed or packs_floats else None
    separate_rounded_inputs(model, config.model, dtype, precision.arithmetic, device)
    use_kernels(model, device, precision.arithmetic, config.model.activations == PUBLISHED)
    possible = is_cpu and can_pack(dtype, arithmetic)
    # Compiled, experts run in static shapes, which gather plain weights; other backends may compile.
    experts = place.backend.name in ("eager", "replay")
    # Other tokens decide how many rows an expert multiplies. With panels, no result of a row depends on that.
    has_stacks = experts and is_cpu and dtype == torch.float32 and any(map(stacked_weights, model.modules()))
    if wanted and not possible:
        raise ValueError(
            "pack_weights needs a CPU, and bfloat16 where our kernels or oneDNN multiply it, or weights that "
            f"our kernels multiply in float32: got {name_of(dtype)} on {device}"
        )
    has_codes = is_cpu and bool(quantised_layers(model))
    if (possible or has_codes or has_stacks) and wanted is not False:
        # Where the kernel for panels does not run, decodes of one compiled request read plain weights faster
        # than oneDNN's; panels come before both.
        is_vector = config.scheduler.max_num_seqs == 1 and place.backend.name == "compile"
        vector = [layer.module for layer in layers] if is_vector else []
        rounded = dtype if quantisation_of(config.model.path) is None else None
        before = plain_bytes(model) + code_bytes(model, rounded)
        head = model.get_output_embeddings()
        pack_linears(model, vector=vector, head=head, live=live, arithmetic=arithmetic, experts=experts)
        if arithmetic is not None and precision.is_mixed:
            widen(model, arithmetic)
        leave_files(model, before - plain_bytes(model))
        if has_codes:
            return_memory()


def _make_executor(
    config: EngineConfig,
    model: StepModel,
    store: KVStore,
    tables: StepTables,
    runtime: DeviceRuntime,
    shared: Shared | None,
    drafts: DraftSteps | None,
) -> Executor:
    memory = store.plan
    policy = config.graph.on_miss if tables.uses_table else MissPolicy.EAGER
    graphs = GraphCache(tables.backend, tables.table(memory), policy, config.graph.max_captured_tokens)
    geometry = tables.geometry(memory)
    spread = followers = exchanges = membership = None
    if shared is not None:
        membership, followers = shared.membership, shared.followers
        spread = SpreadLogits(
            membership.ranks, membership.group, shared.hf_config.get_text_config().vocab_size
        )
        sizes = (model.model.config.get_text_config().hidden_size, model.model.dtype.itemsize)
        exchanges = StepExchanges.of_model(model.model, model.specs, *sizes, geometry.row_len)
        if drafts is not None:
            drafting = drafts.model
            drafts.exchanges = StepExchanges.of_model(
                drafting.model, drafting.specs, *sizes, geometry.row_len
            )
    executor = Executor(
        model,
        store,
        geometry,
        graphs,
        use_table=tables.uses_table,
        largest=tables.largest(memory),
        device=store.device,
        runtime=runtime,
        fail_on_recompile=config.graph.fail_on_recompile,
        spread=spread,
        followers=followers,
        exchanges=exchanges,
        drafts=drafts,
        link=host_link(config, store, runtime, membership, tables.backend, tables.largest(memory)),
    )
    if shared is not None:
        # One broadcast per step, unless masks or histories of penalties exceed that.
        rows = executor.largest.num_logits * geometry.decode_len
        shared.membership.link.reserve(executor.inputs.buffer.nbytes + rows * _ROW_BYTES + _MESSAGE_BYTES)
    return executor


def _drafts(
    config: EngineConfig,
    served: StepModel,
    tables: StepTables,
    memory: MemoryPlan,
    place: Place,
    draft: DraftModel | None,
) -> DraftSteps | None:
    """Return what runs drafts of a model; None without them.

    Args:
        served: the model.
        draft: one that drafts for it over its own stores.

    Raises:
        ValueError: ``served`` drafts, and has states that a draft would change.
    """
    speculation = config.scheduler.speculation
    if speculation is None or not speculation.is_by_model:
        return None
    geometry, table = tables.geometry(memory), tables.table(memory)
    policy = config.graph.on_miss if tables.uses_table else MissPolicy.EAGER

    def graphs_of(buckets: BucketTable, scope: str) -> GraphCache:
        # Buckets may be equal to those of steps, and a backend that is given as an object is shared.
        backend = _backend(config, place.device, place.runtime)
        return GraphCache(backend, buckets, policy, config.graph.max_captured_tokens, scope)

    own, model = None, served
    if draft is None:
        check_stores(model)
    else:
        store, model = draft.build(memory, served)
        shapes_of = partial(message_fields, geometry)
        own = OwnStores(
            store, graphs_of(table, "draft model"), geometry, lambda bucket: pack(shapes_of(bucket))
        )
    fields = draft_fields(speculation, tables, memory)
    graphs = graphs_of(fields.table(table, geometry.row_len), "drafts")
    named = {
        "stages": place.runtime.compiles_operators,
        "is_greedy": speculation.draft_sample_method == "greedy",
    }
    if draft is None or not draft.is_of_checkpoint:
        return DraftSteps(model, fields, graphs, place.device, own, **named)
    states = draft.states(tables.largest(memory), memory.num_blocks, place.device)
    keep_hidden(served.model, states.served)
    layers: Any = model.model
    layers.attach(states, model.running)
    return MtpSteps(states, model, fields, graphs, place.device, own, **named)


def _budget(config: EngineConfig, runtime: DeviceRuntime, num_coming: int) -> DeviceBudget:
    """Return the memory of the device once ``num_coming`` more bytes are in use."""
    return DeviceBudget(
        runtime.total_bytes(),
        runtime.used_bytes() + num_coming,
        runtime.free_bytes() - num_coming,
        config.cache.device_memory_utilization,
    )


def _in_order(
    model: PreTrainedModel, layers: Sequence[DecoderLayer], blueprint: Blueprint
) -> list[nn.Module]:
    """Return the layers of all kinds in the order in which they run."""
    known = [*(layer.module for layer in layers), *(each.module for each in blueprint.recurrent)]
    every = {*known, *layers_besides(model, known)}
    return [module for module in model.modules() if module in every]


def _weight_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
