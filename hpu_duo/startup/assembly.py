"""Builds an engine from a checkpoint and a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from hpu_duo.config.engine import EngineConfig
from hpu_duo.config.limits import SchedulerConfig
from hpu_duo.drafting import make_drafter
from hpu_duo.engine.engine import Engine
from hpu_duo.engine.on_host.runner import HostRunner, describe
from hpu_duo.engine.scheduler import ChunkTrimming, Scheduler
from hpu_duo.engine.stats import Resolved, faster_kernels, weight_dtype
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.engine.stepper import Runner
from hpu_duo.engine.zigzag.runner import ZigZagRunner
from hpu_duo.garbage import collector_paused
from hpu_duo.heads.eviction.fastgen import TokenClassifier
from hpu_duo.modeling.config_checks import NoPositionsError, frequencies_note
from hpu_duo.modeling.loading import build_without_weights, load_model, read_config
from hpu_duo.modeling.precision import Precision
from hpu_duo.modeling.probe import probe, read_layers
from hpu_duo.modeling.quantised.execution import choose_execution, execution_note, rounding_of
from hpu_duo.request import TokenLimits
from hpu_duo.scheduling import make_policy
from hpu_duo.startup.blueprint import fix_served_len, request_len
from hpu_duo.startup.device_side import DeviceSide, Place
from hpu_duo.startup.head_choice import check_pattern
from hpu_duo.startup.heads import latent_note
from hpu_duo.startup.kv_formats import check_scales, scales_note, unused_note
from hpu_duo.startup.offloading import attach_disk, attach_tiers, capped_note, check_kv_shares
from hpu_duo.startup.sharding import build_led, executed, native_code_built, settle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpu_duo.scheduling.ranker import Ranker


def read_ranker(config: SchedulerConfig, vocab_size: int) -> Ranker | None:
    """Read the ranker that a configuration names; None without one.

    Args:
        vocab_size: of the model that is served.

    Raises:
        ValueError: the policy needs one and none is set, or it needs none; the ranker cannot be read, or has
            a smaller vocabulary.
    """
    name, directory = config.scheduling_policy, config.ranker
    if make_policy(name).needs_scores != (directory is not None):
        wanted = "ranker, a directory," if directory is None else "no ranker, which 'ltr' needs,"
        raise ValueError(f"expected {wanted} with scheduling_policy={name!r}, got {directory}")
    if directory is None:
        return None
    from hpu_duo.scheduling.ranker import load_ranker

    ranker = load_ranker(Path(directory))
    if ranker.vocab_size is not None and ranker.vocab_size < vocab_size:
        raise ValueError(
            f"expected a ranker with a vocabulary of at least {vocab_size} tokens, got {ranker.vocab_size} "
            f"in {directory}"
        )
    return ranker


_log = logging.getLogger(__name__)


def assemble(
    config: EngineConfig,
    eos_token_ids: frozenset[int],
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
    notes: tuple[str, ...] = (),
) -> Engine:
    """Load a checkpoint and build everything that serves it.

    Args:
        notes: on how the configuration was resolved before.

    Raises:
        ValueError: the checkpoint cannot be read or served, or the configuration does not fit it
            or this machine.
        RankError: one of several ranks could not be started.
        Followed: this process is not the first of several ranks, and has followed it to the end.
    """
    check_kv_shares(config)
    config, choice = settle(config)
    make_policy(config.scheduler.scheduling_policy)  # refused before weights are read
    hf_config = read_config(config.model.path)
    rounding_of(config.model.path, config.model.quantization)  # refused before weights are read
    read_ranker(config.scheduler, hf_config.get_text_config().vocab_size)
    _check_length(config, hf_config)  # and so is this
    pattern_notes = check_pattern(config.heads, config.model.path)
    if config.parallel.tensor_parallel_size > 1:
        side = build_led(config)
        device = side.runner.device
    else:
        place = Place.of(config)
        device = place.device
        check_scales(config.cache, device)  # and these
        precision = Precision.choose(config.model.dtype, hf_config, device.type)
        with collector_paused(), native_code_built(config.model, place, precision.arithmetic):
            execution, precision = executed(config.model, precision, device)
            model = load_model(config.model.path, hf_config, precision.weights, place.first_device, execution)
            side = _device_side(model, config, place, precision)
    precision = Precision.choose(config.model.dtype, hf_config, device.type)
    # Models whose linears are not packed have weights in the dtype of arithmetic.
    precision = replace(precision, weights=weight_dtype(side.runner))
    engine = engine_around(side, config, eos_token_ids, tokenizer, seed)
    engine.notes = (
        *precision.notes(config.model.dtype, hf_config),
        *execution_note(config.model.path, choose_execution(config.model, precision.arithmetic, device)),
        *pattern_notes,
        *notes,
        *choice,
        *engine.notes,
    )
    return engine


def _check_length(config: EngineConfig, hf_config: Any) -> None:
    try:
        request_len(config, hf_config.get_text_config())
    except NoPositionsError:
        # An error that max_model_len does not resolve is raised first.
        read_layers(build_without_weights(config.model.path, hf_config, torch.float32))
        raise


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
        config: its path and dtype are not used, nor is the model of its head pattern.

    Raises:
        ValueError: the model cannot be served, or the configuration does not fit it or this machine, or has
            several ranks, each of which would need a part of the model.
    """
    if config.parallel.tensor_parallel_size > 1:
        raise ValueError(
            "several ranks load their parts of a checkpoint: expected a path, got a loaded model"
        )
    if config.model.quantization != "auto":
        raise ValueError(
            f"weights are quantised while a checkpoint is read: expected a path for "
            f"quantization={config.model.quantization}, got a loaded model"
        )
    if config.cache.kv_offloading_disk is not None:
        raise ValueError(
            "records on disk are found by the files of their model: expected a path for "
            f"kv_offloading_disk={config.cache.kv_offloading_disk}, got a loaded model"
        )
    make_policy(config.scheduler.scheduling_policy)
    check_kv_shares(config)
    place = Place.of(config)
    with native_code_built(config.model, place, model.dtype):
        side = _device_side(model, config, place)
    return engine_around(side, config, eos_token_ids, tokenizer, seed)


def _device_side(
    model: PreTrainedModel, config: EngineConfig, place: Place, precision: Precision | None = None
) -> DeviceSide:
    fix_served_len(model, config)
    return DeviceSide.build(model, probe(model), config, place, precision=precision)


def engine_around(
    side: DeviceSide,
    config: EngineConfig,
    eos_token_ids: frozenset[int],
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
) -> Engine:
    """Create the engine of a device side: scheduler, intake and outputs.

    Raises:
        ValueError: a KV policy needs classes of tokens, and there is no tokenizer.
    """
    runner, blueprint, limits = side.runner, side.blueprint, side.limits
    vocab_size = side.hf_config.get_text_config().vocab_size
    if limits.uses_token_classes:
        if tokenizer is None:
            raise ValueError("kv_policy 'fastgen' needs the model's tokenizer, which has the special tokens")
        runner.builder.class_of = TokenClassifier(tokenizer).table(vocab_size)
    policy = make_policy(config.scheduler.scheduling_policy)
    scheduler = Scheduler(limits, _trimming(config, runner), policy)
    attach_tiers(config.cache, runner.store.plan, limits, scheduler, runner.executor.link)
    ranker = read_ranker(config.scheduler, vocab_size)
    token_limits = TokenLimits(limits.max_model_len, eos_token_ids, vocab_size)
    engine = Engine(runner, scheduler, token_limits, tokenizer, seed, ranker)
    capped = capped_note(config, runner.store.plan, limits.max_model_len)
    engine.notes = (
        *frequencies_note(blueprint.text_config, blueprint.max_len),
        *latent_note(blueprint.layers, blueprint.specs, blueprint.text_config),
        *unused_note(blueprint.specs, config.cache, blueprint.dtype),
        *capped,
        *scales_note(blueprint.specs, runner.model.kv_scales, config.cache, config.model.path),
    )
    if (stream := runner.model.stream) is not None:
        engine.notes = (*engine.notes, stream.describe())
    host = runner.host if isinstance(runner, (HostRunner, ZigZagRunner)) else None
    if host is not None and not capped:
        engine.notes = (*engine.notes, describe(host, limits.block_size))
    if isinstance(runner, ZigZagRunner):
        engine.notes = (*engine.notes, *runner.notes)
    engine.hf_config = side.hf_config
    engine.pattern, engine.own_pattern = blueprint.pattern, blueprint.own_pattern
    engine.notes = (*engine.notes, *attach_disk(engine, config))
    if (speculation := config.scheduler.speculation) is not None:
        engine.drafter = make_drafter(speculation)
    if config.graph.replan is not None:
        engine.replan(config.graph.replan)
    resolved = engine.stats().resolved
    engine.notes = (*engine.notes, *_promotion_note(resolved), *faster_kernels(runner))
    _log.info("engine of %s: %s", type(runner.model.model).__name__, resolved)
    return engine


def _promotion_note(resolved: Resolved) -> tuple[str, ...]:
    """A note with the bytes of promoted heads; nothing where none is promoted."""
    if not resolved.num_promoted_heads:
        return ()
    note = (
        f"warning: {resolved.num_promoted_heads} streaming heads are promoted to retrieval heads on this "
        "device (max_layer_kinds, or equally many on each rank), which takes "
        f"{resolved.promoted_bytes / 2**20:,.1f} MiB of the KV cache beyond their rings"
    )
    _log.warning("%s", note.removeprefix("warning: "))
    return (note,)


def _trimming(config: EngineConfig, runner: Runner) -> Callable[[StepPlan], int] | None:
    if not config.scheduler.trim_chunks:
        return None
    # A warm-up may replace the runner's table.
    return lambda plan: ChunkTrimming(runner.graphs.table, config.block_size).num_postponed(plan)
