"""Put an engine together from a checkpoint and a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from graphs import CaptureBackend, GraphCache, MissPolicy, make_backend
from graphs.backends import CHOSEN_LATER, chosen_name
from graphs.backends.replay import ReplayBackend
from hpu_duo.budget import DeviceBudget
from hpu_duo.config import EngineConfig
from hpu_duo.device import DeviceRuntime, resolve_device, runtime_for
from hpu_duo.engine.engine import Engine
from hpu_duo.engine.executor import Executor
from hpu_duo.engine.resolved import Resolved
from hpu_duo.engine.runner import Runner
from hpu_duo.engine.scheduler import Scheduler
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.engine.trimming import ChunkTrimming
from hpu_duo.heads import permute_heads
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.kv.store import KVStore
from hpu_duo.modeling.file_weights import leave_files, plain_bytes
from hpu_duo.modeling.fused_modules import fuse_modules
from hpu_duo.modeling.live_rows import LiveRows
from hpu_duo.modeling.loading import dtype_note, load_model, read_config, resolve_dtype
from hpu_duo.modeling.packed_linear import can_pack, pack_linears
from hpu_duo.modeling.probe import DecoderLayer, probe
from hpu_duo.modeling.rope import frequencies_note, served_len
from hpu_duo.modeling.row_fusion import fuse_rows
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.request import TokenLimits
from hpu_duo.scheduling import make_policy
from hpu_duo.startup.blueprint import Blueprint, fix_served_len
from hpu_duo.startup.graph_memory import plan_with_graphs
from hpu_duo.startup.heads import check_pattern
from hpu_duo.startup.kernels import choose_kernels
from hpu_duo.startup.tables import StepTables
from kernels_ref import Implementation, Softmax, rowwise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


def assemble(
    config: EngineConfig,
    eos_token_ids: frozenset[int],
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
) -> Engine:
    """Load a checkpoint and build everything that serves it.

    Raises:
        ValueError: the checkpoint cannot be read or served, or the configuration does not fit it
            or this machine.
    """
    lazy = _lazy_mode(config)
    device = resolve_device(config.model.device, lazy)
    runtime = runtime_for(device, lazy)
    _backend(config, device, runtime)  # refused before weights are read, as is an unknown policy
    make_policy(config.scheduler.scheduling_policy)
    hf_config = read_config(config.model.path)
    dtype = resolve_dtype(config.model.dtype, hf_config, device.type)
    served_len(hf_config.get_text_config(), config.scheduler.max_model_len)  # refused before weights are read
    notes = (
        *dtype_note(config.model.dtype, hf_config, dtype),
        *check_pattern(config.heads, config.model.path),
    )
    model = load_model(config.model.path, hf_config, dtype, _first_device(device, runtime))
    engine = assemble_around(model, config, eos_token_ids, tokenizer, seed)
    engine.notes = (*notes, *engine.notes)
    return engine


def assemble_around(
    model: PreTrainedModel,
    config: EngineConfig,
    eos_token_ids: frozenset[int],
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
) -> Engine:
    """Build everything that serves a model which is already in memory, in its dtype.

    Args:
        model: in evaluation mode, with our attention function; changed in place: heads are reordered, linear
            weights packed on CPU, and rotary frequencies that depend on the text's length stay those of
            the longest request.
        config: its path and dtype are not used, nor is the model that its head pattern was made for.

    Raises:
        ValueError: the model cannot be served, or the configuration does not fit it or this machine.
    """
    lazy = _lazy_mode(config)
    device = resolve_device(config.model.device, lazy)
    runtime = runtime_for(device, lazy)
    backend, policy = _backend(config, device, runtime), make_policy(config.scheduler.scheduling_policy)
    first_device = _first_device(device, runtime)
    fix_served_len(model, config)
    layers = probe(model)
    softmax = Softmax(config.model.softmax)
    kernels = choose_kernels(config.model.attention, device, layers, model.dtype, softmax)
    blueprint = Blueprint.draw(model, layers, config, device, kernels)
    budget = _budget(config, runtime, 0 if first_device == device else _weight_bytes(model))
    tables = blueprint.tables(backend, is_padding=runtime.compiles_operators)
    if config.scheduler.trim_chunks and not tables.uses_table:  # refused before weights are packed
        raise ValueError(
            "trim_chunks needs a table of buckets to trim to: expected graphs other than 'eager', or buckets"
        )
    memory = _plan_memory(blueprint, budget, tables)

    permute_heads(
        [layer.attention for layer in layers],
        [each.layout for each in blueprint.heads],
        [layer.call.head_dim for layer in layers],
    )
    if kernels.impl is Implementation.HPU:
        fused = fuse_modules(model, [layer.attention for layer in layers], device)
        _log.info("by fused operators: %s", ", ".join((*kernels.operators.names, *fused)))
    live = LiveRows()
    _pack(config, model, layers, model.dtype, device, backend, live)
    runtime.place(model)
    store, step_model = blueprint.build(model, memory, live)
    executor = _make_executor(config, step_model, store, tables, runtime)
    limits, vocab_size = tables.limits(memory), blueprint.text_config.vocab_size
    runner = Runner(executor, vocab_size, limits.max_model_len)
    scheduler = Scheduler(limits, _trimming(config, runner), policy)
    token_limits = TokenLimits(limits.max_model_len, eos_token_ids, vocab_size)
    engine = Engine(runner, scheduler, token_limits, tokenizer, seed)
    engine.notes = frequencies_note(blueprint.text_config, blueprint.max_len)
    engine.pattern = blueprint.pattern
    _log.info("engine of %s: %s", type(model).__name__, Resolved.of(runner, scheduler, engine.pattern))
    return engine


def _plan_memory(blueprint: Blueprint, budget: DeviceBudget, tables: StepTables) -> MemoryPlan:
    """Plan the stores beside the memory of graphs, which is asked for or estimated."""
    asked = blueprint.config.graph.memory_bytes
    if asked is not None:
        return blueprint.memory(budget, graph_bytes=asked)
    bound, dtype_bytes = budget.graph_bytes(), blueprint.dtype.itemsize
    return plan_with_graphs(
        lambda graph_bytes: blueprint.memory(budget, graph_bytes=graph_bytes),
        lambda plan: min(bound, tables.graph_bytes(plan, dtype_bytes)),
    )


def _trimming(config: EngineConfig, runner: Runner) -> Callable[[StepPlan], int] | None:
    if not config.scheduler.trim_chunks:
        return None
    # A warm-up may give the runner another table.
    return lambda plan: ChunkTrimming(runner.graphs.table, config.cache.block_size).num_postponed(plan)


def _first_device(device: torch.device, runtime: DeviceRuntime) -> torch.device:
    """Return the device to probe a model on: the host, if the device would compile every operator."""
    return torch.device("cpu") if runtime.compiles_operators else device


def _pack(
    config: EngineConfig,
    model: PreTrainedModel,
    layers: tuple[DecoderLayer, ...],
    dtype: torch.dtype,
    device: torch.device,
    backend: CaptureBackend,
    live: LiveRows,
) -> None:
    wanted = config.model.pack_weights
    possible = device.type == "cpu" and can_pack(dtype)
    if wanted and not possible:
        raise ValueError(
            f"pack_weights needs bfloat16 on a CPU whose oneDNN supports it, got {dtype} on {device}"
        )
    if possible and wanted is not False:
        # Where the kernel for panels does not run, decodes of one compiled request read plain weights faster
        # than oneDNN's; panels come before both.
        is_vector = config.scheduler.max_num_seqs == 1 and backend.name == "compile"
        vector = [layer.module for layer in layers] if is_vector else []
        before = plain_bytes(model)
        pack_linears(model, vector=vector, head=model.get_output_embeddings(), live=live)
        leave_files(model, before - plain_bytes(model))


def _make_executor(
    config: EngineConfig, model: StepModel, store: KVStore, tables: StepTables, runtime: DeviceRuntime
) -> Executor:
    memory = store.plan
    policy = config.graph.on_miss if tables.uses_table else MissPolicy.EAGER
    graphs = GraphCache(tables.backend, tables.table(memory), policy, config.graph.max_captured_tokens)
    return Executor(
        model,
        store,
        tables.geometry(memory),
        graphs,
        use_table=tables.uses_table,
        largest=tables.largest(memory),
        device=store.device,
        runtime=runtime,
        fail_on_recompile=config.graph.fail_on_recompile,
    )


def _lazy_mode(config: EngineConfig) -> bool | None:
    """Return the mode of HPU that the capture backend needs; None if the user's environment decides."""
    backend = config.graph.backend
    name = backend if isinstance(backend, str) else backend.name
    return {"hpu-graph": True, "hpu-compile": False}.get(name)


def _backend(config: EngineConfig, device: torch.device, runtime: DeviceRuntime) -> CaptureBackend:
    """The capture backend.

    Raises:
        ValueError: it cannot capture steps on the device; nothing falls back to another one.
    """
    chosen = config.graph.backend
    own = runtime.own_backend()
    if own is not None and isinstance(chosen, str):
        if chosen not in ("eager", *CHOSEN_LATER):
            raise ValueError(f"device {runtime.name!r} captures steps in its own way, got graphs={chosen!r}")
        return own
    if isinstance(chosen, str):
        chosen = _make_backend(chosen_name(chosen, device.type, runtime.is_lazy))
    problem = chosen.problem(device)
    if problem is not None:
        raise ValueError(f"graphs={chosen.name!r} cannot be used: {problem}")
    return chosen


def _budget(config: EngineConfig, runtime: DeviceRuntime, num_coming: int) -> DeviceBudget:
    """Return the memory of the device once ``num_coming`` more bytes of weights are there."""
    return DeviceBudget(
        runtime.total_bytes(),
        runtime.used_bytes() + num_coming,
        runtime.free_bytes() - num_coming,
        config.cache.device_memory_utilization,
    )


def _make_backend(name: str) -> CaptureBackend:
    return ReplayBackend(fuse_rows) if name == "replay" and rowwise.is_available() else make_backend(name)


def _weight_bytes(model: PreTrainedModel) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
