"""Starts an engine of several ranks: choice of the sharding, and checks that all ranks agree."""

from __future__ import annotations

import hashlib
import logging
import platform
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedModel

from graphs import BucketTable
from hpu_duo.config.engine import EngineConfig, ModelConfig
from hpu_duo.config.kv_plan import KVPlan
from hpu_duo.device import DeviceRuntime, Member, resolve_device, usable_name
from hpu_duo.device.collectives import check_exchanges
from hpu_duo.device.habana_environment import card_type
from hpu_duo.device.ranks import MEETING_S, TORCHRUN, Launched, Membership, Ranks, WorkerRanks
from hpu_duo.engine.orders import follow
from hpu_duo.garbage import collector_paused
from hpu_duo.heads import HeadPattern
from hpu_duo.modeling.hub import model_fingerprint
from hpu_duo.modeling.loading import build_without_weights, read_config
from hpu_duo.modeling.precision import Precision
from hpu_duo.modeling.probe import DecoderLayer, probe, read_layers
from hpu_duo.modeling.quantised.execution import choose_execution, kernel_for
from hpu_duo.modeling.quantised.linear import DEQUANTISED, WeightExecution
from hpu_duo.parallel import ExpertShare, RankHeads, Sums, narrowed_config
from hpu_duo.parallel.config import check_plan
from hpu_duo.parallel.loading import load_share, make_cutter
from hpu_duo.parallel.share_trial import check_share
from hpu_duo.planning import GAUDI2, GAUDI3, Hardware, ModelSize, Serving
from hpu_duo.planning.read_model import read_model
from hpu_duo.planning.retrieval_choice import (
    ChoiceCosts,
    RetrievalChoice,
    SharedHeads,
    choose_retrieval,
    obstacle_to_context,
)
from hpu_duo.startup.blueprint import fix_served_len, request_len
from hpu_duo.startup.device_side import DeviceSide, Place, Shared, lazy_mode
from hpu_duo.startup.heads import ChosenHeads, Shares, check_context_parallel, choose_heads, kv_layers
from hpu_duo.startup.kv_budget import pools_heads, read_kv_plan
from hpu_duo.startup.ranks import Launch, LedRanks, OwnLaunch, TorchrunLaunch, heartbeat_to_rank_0, joined_as
from hpu_duo.version import __version__
from kernels_ref import Implementation, rowwise
from kernels_ref.x86 import library as x86

_log = logging.getLogger(__name__)

_NOT_PREDICTED = ("cpu", "cuda")
"""Devices that the cost model does not cover."""


def settle(config: EngineConfig) -> tuple[EngineConfig, tuple[str, ...]]:
    """Return a configuration with ``retrieval_parallel`` resolved, and the choice as a note for the user.

    There is no note where it was not "auto", or with one rank.

    Raises:
        ValueError: the checkpoint's configuration cannot be read, or the head pattern does not fit it.
    """
    parallel = config.parallel
    if parallel.retrieval_parallel != "auto":
        return config, ()
    speculation = config.scheduler.speculation
    needs_heads = speculation is not None and (
        speculation.has_own_stores or speculation.draft_sparsity is not None
    )
    if parallel.tensor_parallel_size == 1 or needs_heads:
        return _with(config, "heads"), ()
    choice = _chosen(config)
    _log.info("%s", choice)
    return _with(config, choice.chosen), (str(choice),)


def captures_exchanges(config: EngineConfig) -> bool:
    """Whether the capture backend supports layers with context-parallel blocks.

    Torch's compiler for CPUs writes its outer code in C++, which has no form for gathers.
    """
    backend = config.graph.backend
    name = backend if isinstance(backend, str) else backend.name
    return name != "compile" or resolve_device(config.model.device).type != "cpu"


def _with(config: EngineConfig, chosen: str) -> EngineConfig:
    parallel = replace(config.parallel, retrieval_parallel=chosen, retrieval_parallel_context=None)
    return replace(config, parallel=parallel)


def _chosen(config: EngineConfig) -> RetrievalChoice:
    """The choice for the Gaudi at hand, or a Gaudi 3 on the simulated one.

    Other devices are predicted as a Gaudi 3 only for a stated length: by default they would pay for further
    exchanges on the word of a model of another device.
    """
    path, num_ranks, scheduler = config.model.path, config.parallel.tensor_parallel_size, config.scheduler
    # No card is acquired: ranks have not been assigned theirs yet.
    kind = usable_name(config.model.device, lazy_mode(config)).partition(":")[0]
    hf_config = read_config(path, needs_weights=False)
    layers = read_layers(build_without_weights(path, hf_config, torch.float32))
    obstacle = obstacle_to_context(
        is_uneven=any(layer.call.num_kv_heads % num_ranks for layer in layers),
        pools_heads=pools_heads(config),
        captures_exchanges=captures_exchanges(config),
    )
    max_len = request_len(config, hf_config.get_text_config())
    device = torch.device("cpu" if kind in _NOT_PREDICTED else "hpu")

    def shared(retrieval_parallel: str) -> SharedHeads:
        chosen = choose_heads(_with(config, retrieval_parallel), layers, max_len, device)
        num_promoted = 0 if chosen.pattern is None else chosen.pattern.num_promoted
        return SharedHeads(kv_layers(layers, chosen.heads), num_promoted)

    def faster(by_heads: SharedHeads, by_context: SharedHeads) -> tuple[str, str]:
        if kind in _NOT_PREDICTED and config.parallel.retrieval_parallel_context is None:
            return "heads", f"nothing is predicted for {kind} without retrieval_parallel_context"
        try:
            size = read_model(path)
        except ValueError as error:
            return "heads", f"nothing is predicted: {error}"
        hardware, most = _hardware(kind), config.parallel.retrieval_parallel_context or max_len
        kv_bytes = _kv_bytes(size, Serving(hardware, num_ranks))
        limits = scheduler.max_num_seqs, scheduler.max_chunk_rows, min(most, max_len)
        costs = ChoiceCosts(size, hardware, num_ranks, kv_bytes, config.cache.block_size, *limits)
        return costs.faster(by_heads, by_context)

    num_kv_heads = min(layer.call.num_kv_heads for layer in layers)
    return choose_retrieval(num_ranks, num_kv_heads, shared, faster, obstacle)


def _kv_bytes(size: ModelSize, serving: Serving) -> int:
    try:
        return serving.kv_budget_bytes(size)
    except ValueError:
        # On other devices the model may fit nevertheless.
        return 0


def _hardware(kind: str) -> Hardware:
    """The Gaudi that steps run on; a Gaudi 3 on other devices, which is as good a guess as any."""
    return GAUDI2 if kind == "hpu" and card_type().startswith("GAUDI2") else GAUDI3


_OF_ITS_OWN = ("path", "pattern", "kv_plan", "ranker")
"""Settings that may differ: paths of files, which are compared by content, or read by rank 0 only."""


def check_alike(config: EngineConfig, runtime: DeviceRuntime, membership: Membership) -> None:
    """Check that all ranks have the same model, versions and settings.

    Raises:
        RankError: they differ; the message names what differs, and the ranks.
    """
    membership.compare_all(facts_of(config, runtime))


def facts_of(config: EngineConfig, runtime: DeviceRuntime) -> dict[str, str]:
    """Return the facts that ranks compare before they load anything, by name."""
    return {
        "model (config.json and weights, by model_fingerprint)": model_fingerprint(Path(config.model.path)),
        "version of torch": torch.__version__,
        "version of transformers": transformers.__version__,
        "version of hpu-duo": __version__,
        "version of Python": platform.python_version(),
        "version of the device and its software": runtime.version(),
        **settings_of(config),
    }


def check_same_pattern(pattern: HeadPattern | None, membership: Membership) -> None:
    """Check that all ranks cut the heads of a model alike.

    Raises:
        RankError: they do not; the message names the ranks.
    """
    membership.compare("head pattern (by a digest)", pattern_digest(pattern))


def check_same_plan(plan: KVPlan | None, membership: Membership) -> None:
    """Check that all ranks have the same KV plan.

    Raises:
        RankError: they do not; the message names the ranks.
    """
    membership.compare("KV plan (by a digest)", plan_digest(plan))


def plan_digest(plan: KVPlan | None) -> str:
    """Return a digest of the kinds of heads."""
    return "no plan" if plan is None else hashlib.sha256(repr(plan.as_dict()).encode()).hexdigest()


def settings_of(config: EngineConfig) -> dict[str, str]:
    """Return the settings of an engine by name, as texts that are equal where the settings are."""
    sections = [getattr(config, each.name) for each in fields(config)]
    return {
        f"setting {each.name}": _text(getattr(section, each.name))
        for section in sections
        for each in fields(section)
        if each.name not in _OF_ITS_OWN
    }


def _text(value: Any) -> str:
    if isinstance(value, BucketTable):
        return f"a table of {len(value)} buckets, {hashlib.sha256(str(list(value)).encode()).hexdigest()}"
    # A custom capture backend, which has no stable representation.
    return str(getattr(value, "name", value))


def pattern_digest(pattern: HeadPattern | None) -> str:
    """Return a digest of the heads that retrieve and of the window of others."""
    if pattern is None:
        return "every head retrieves"
    words = f"{pattern.sink} {pattern.recent} {pattern.mask.shape} ".encode()
    return hashlib.sha256(words + pattern.mask.tobytes()).hexdigest()


@contextmanager
def native_code_built(model: ModelConfig, place: Place, dtype: torch.dtype) -> Iterator[None]:
    """Begin to build what an engine will need, and wait for it after what is done inside.

    What cannot be built is done without, with the warning of each library.

    Args:
        model: as configured.
        dtype: of its activations.
    """
    libraries = _needed(model, place, dtype)
    if not libraries:
        yield
        return
    threads = ThreadPoolExecutor(len(libraries), thread_name_prefix="hpu-duo-build")
    building = [threads.submit(is_available) for is_available in libraries]
    threads.shutdown(wait=False)
    yield
    for each in building:
        each.result()


def _needed(model: ModelConfig, place: Place, dtype: torch.dtype) -> list[Callable[[], bool]]:
    """Functions that load libraries and build them where need be, the longest source first."""
    if place.device.type != "cpu":
        return []
    attends = model.attention in ("auto", Implementation.SDPA.value)
    runs_x86 = x86.serves(dtype, dtype) and (attends or model.pack_weights is not False)
    found: list[Callable[[], bool]] = []
    if place.fuses_rows:
        found.append(rowwise.is_available)
    if runs_x86:
        found.append(partial(x86.is_available, dtype))
    return found


class Followed(SystemExit):
    """The end of a process that has followed rank 0 until the order to stop: with exit code 0."""


def build_led(config: EngineConfig) -> DeviceSide:
    """Start the worker ranks, or join those of a launcher, and build the shard of rank 0.

    Raises:
        ValueError: the model cannot be sharded over the ranks, or does not fit the configuration or the
            launcher's variables.
        RankError: a rank could not be started.
        Followed: this process is a worker rank, and all ranks have ended.
    """
    _check_shared(config)
    size, timeout_s = config.parallel.tensor_parallel_size, config.parallel.timeout_s
    device = str(config.model.device)
    launch: Launch
    local_rank = 0
    if config.parallel.launcher == TORCHRUN:
        launched = Launched.here(size)
        launch, local_rank = TorchrunLaunch(device, launched, MEETING_S), launched.local_rank
        if launched.rank:
            _follow(Ranks(launched.rank, size), local_rank, launch.store, config)
            raise Followed(0)
    else:
        launch = OwnLaunch(device, size, follow_rank_0, (config,))
    ranks = LedRanks(launch, size, timeout_s)
    try:
        place = Place.of(config, local_rank)
        membership = ranks.join(place.runtime.collectives(), place.device)
        side = build_share(config, place, membership, ranks)
    except BaseException as error:
        cause = ranks.cause(error)
        ranks.stop()
        raise cause from error
    ranks.is_led = True
    weakref.finalize(side.runner.executor, ranks.stop)
    return side


def _check_shared(config: EngineConfig) -> None:
    """Raise ValueError for models that cannot be sharded, before processes start."""
    path, ranks = config.model.path, Ranks(0, config.parallel.tensor_parallel_size)
    hf_config = read_config(path)
    check_plan(hf_config)
    whole = build_without_weights(path, hf_config, torch.float32)
    layers = read_layers(whole)
    call = layers[0].call
    # Before heads are counted: it names the number that ranks cannot share.
    experts = _experts(config, hf_config, ranks)
    narrowed_config(hf_config, call.head_dim, ranks.size, experts)
    # A pattern changes which heads a rank has, and not how many.
    heads = [RankHeads.of([range(each.call.num_kv_heads)], each.call.num_heads, ranks) for each in layers]
    check_share(path, hf_config, torch.float32, whole, layers, heads, ranks, experts)
    if config.cache.kv_policy is not None or config.cache.kv_plan is not None:
        choose_heads(config, layers, request_len(config, hf_config.get_text_config()), torch.device("cpu"))
    if config.parallel.deals_blocks:
        check_context_parallel(min(each.call.num_kv_heads for each in layers), ranks.size)
        if not captures_exchanges(config):
            raise ValueError(
                "expected graphs other than 'compile' on a CPU for retrieval_parallel='context': torch's "
                "compiler does not support gathers between ranks there"
            )


def _experts(config: EngineConfig, hf_config: Any, ranks: Ranks) -> ExpertShare | None:
    return ExpertShare.of(hf_config, ranks) if config.parallel.expert_parallel else None


def follow_rank_0(member: Member, config: EngineConfig) -> None:
    """Follow rank 0 in a process that it has started."""
    _follow(Ranks(member.rank, member.size), member.rank, member.store(), config)


def _follow(ranks: Ranks, local_rank: int, store: dist.Store, config: EngineConfig) -> None:
    """Build the shard of a worker rank, and execute the orders of rank 0 until the end."""
    timeout_s = config.parallel.timeout_s
    with heartbeat_to_rank_0(ranks.rank, store, timeout_s) as heartbeat:
        place = Place.of(config, local_rank)
        backend = place.runtime.collectives()
        # Reported before the others can detect that this rank has left the group.
        with joined_as(ranks, backend, store, place.device, timeout_s) as membership, heartbeat.reporting():
            side = build_share(config, place, membership, None)
            follow(membership.link, side.runner, heartbeat.count)
            side.runner.close_disk()
            heartbeat.close()


@collector_paused()
def build_share(
    config: EngineConfig, place: Place, membership: Membership, followers: WorkerRanks | None
) -> DeviceSide:
    """Build the share of one rank, while all others do so too.

    Args:
        followers: the others, on rank 0.

    Raises:
        ValueError: see ``load_rank``.
        RankError: ranks differ, or do not exchange data correctly.
    """
    path = config.model.path
    hf_config = read_config(path)
    check_alike(config, place.runtime, membership)
    check_same_plan(read_kv_plan(config), membership)
    precision = Precision.choose(config.model.dtype, hf_config, place.device.type)
    arithmetic = precision.arithmetic
    check_exchanges(membership, place.device, arithmetic, sends_to_each=config.parallel.deals_blocks)
    with native_code_built(config.model, place, arithmetic):
        execution, precision = executed(config.model, precision, place.device)
        membership.compare("dtypes (of weights, of keys and values, of arithmetic)", str(precision))
        share = load_rank(
            config, hf_config, precision, place.device, membership.ranks, membership.group, execution
        )
        check_same_pattern(share.chosen.pattern, membership)
        shared = Shared(membership, hf_config, share.sums, followers)
        return DeviceSide.build(share.model, share.layers, config, place, share.chosen, shared, precision)


def executed(
    model: ModelConfig, precision: Precision, device: torch.device
) -> tuple[WeightExecution, Precision]:
    """Choose the execution of the weights of a checkpoint, and the dtypes to load it in.

    Plain weights beside codes that no kernel reads are in the dtype of arithmetic.

    Raises:
        ValueError: see ``choose_execution``.
    """
    execution = choose_execution(model, precision.arithmetic, device)
    if execution.keeps is not DEQUANTISED.keeps and kernel_for(device, precision.arithmetic) is None:
        precision = Precision.of(precision.arithmetic)
    return execution, precision


class RankShare(NamedTuple):
    """One rank's share of a model, loaded.

    Attributes:
        model: with heads in the order of their groups.
        layers: as probed.
        chosen: groups of heads.
        sums: where ranks sum.
    """

    model: PreTrainedModel
    layers: tuple[DecoderLayer, ...]
    chosen: ChosenHeads
    sums: Sums


def load_rank(
    config: EngineConfig,
    hf_config: Any,
    precision: Precision,
    device: torch.device,
    ranks: Ranks,
    group: str,
    execution: WeightExecution = DEQUANTISED,
) -> RankShare:
    """Load one rank's share of a model, in the dtype of its weights.

    Args:
        group: name of the ranks' process group.
        execution: of quantised weights.

    Raises:
        ValueError: see ``load_share``, ``probe`` and ``choose_heads``; or a share attends in another way.
    """
    path, dtype = config.model.path, precision.weights
    whole = build_without_weights(path, hf_config, dtype)
    whole_layers = read_layers(whole)
    max_len = request_len(config, hf_config.get_text_config())
    chosen = choose_heads(config, whole_layers, max_len, device)
    parallel, is_planned = config.parallel, config.cache.kv_plan is not None
    shares = Shares(ranks, group, deals_blocks=parallel.deals_blocks, is_planned=is_planned)
    heads = [
        shares.heads(index, each, layer)
        for index, (layer, each) in enumerate(zip(whole_layers, chosen.heads))
    ]
    experts = _experts(config, hf_config, ranks)
    check_share(path, hf_config, precision.arithmetic, whole, whole_layers, heads, ranks, experts)
    model = load_share(path, hf_config, dtype, whole, whole_layers, heads, ranks, experts, execution)
    fix_served_len(model, config)
    layers = probe(model)
    assigned = tuple(
        shares.assignment(index, each, layer) for index, (each, layer) in enumerate(zip(chosen.heads, layers))
    )
    own = None if chosen.pattern is None else chosen.pattern.of_heads([each.kv for each in heads])
    cutter = make_cutter(hf_config, whole, whole_layers, heads, ranks, experts)
    sums = Sums.of(cutter, whole, whole_layers)
    return RankShare(model, layers, chosen._replace(heads=assigned, own=own), sums)
