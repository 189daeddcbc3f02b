"""Sizes of the tier in host memory, and the parts of an engine that serve it."""

from __future__ import annotations

import logging
import platform
import shutil
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from graphs import BatchShape, CaptureBackend, StepLimits
from hpu_duo.config.engine import ModelConfig
from hpu_duo.config.limits import CacheConfig
from hpu_duo.device.ranks import Membership
from hpu_duo.device.runtime import CpuRuntime, DeviceRuntime, host_memory
from hpu_duo.device.streams import CopiesAside, CopiesStaged
from hpu_duo.engine.on_host.attention import planned_bytes
from hpu_duo.engine.on_host.captured import BucketSizes
from hpu_duo.engine.on_host.choice import HostDecodes
from hpu_duo.engine.on_host.runner import HostRunner, attention_there
from hpu_duo.engine.on_host.tiles import GroupAhead
from hpu_duo.engine.stepper import Runner
from hpu_duo.engine.zigzag.runner import ZigZagRunner
from hpu_duo.kv.allocations import block_moves
from hpu_duo.kv.host_blocks import HostBlocks, fewest_blocks
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.kv.store import KVStore, block_units, row_units
from hpu_duo.kv.tiers.disk import DiskAccess, DiskThreads, DiskTier, SegmentFolder
from hpu_duo.kv.tiers.eviction import ORDERS
from hpu_duo.kv.tiers.host import HostTier
from hpu_duo.kv.tiers.host_link import HostLink, HostRecords, staging_bytes
from hpu_duo.kv.tiers.link import Link
from hpu_duo.kv.tiers.policy import WritePolicy
from hpu_duo.kv.tiers.prefix_tiers import PrefixTiers, RecordSizes
from hpu_duo.kv.tiers.rank_disk import LeadingDisk, OwnFolder, RankDisk
from hpu_duo.kv.tiers.segments import segment_bytes
from hpu_duo.kv.tiers.stage import Stage
from hpu_duo.kv.tiers.staged_link import StagedLink, StagedSizes
from hpu_duo.kv.tiers.stream_link import StreamLink
from hpu_duo.kv.tiers.swap import PreemptionMode, SwapSpace
from hpu_duo.kv.tiers.swapping import Swapping
from hpu_duo.modeling.weight_stream import choose_layers
from hpu_duo.planning.offload import Placement, spread
from hpu_duo.startup.fingerprint import records_digest
from hpu_duo.writable import check_directory

if TYPE_CHECKING:
    from hpu_duo.config.engine import EngineConfig
    from hpu_duo.engine.engine import Engine
    from hpu_duo.engine.executor import Executor
    from hpu_duo.engine.scheduler import Scheduler
    from kernels_ref import LayerSpec

_log = logging.getLogger(__name__)

_GIB = 1 << 30
_ROUNDING = 1e-9
CUT = ("hpu-compile", "hpu-sim")
"""Capture backends whose graphs of layers are cut where queries leave for the host."""
_SHARE = 4
"""At most one of so many blocks, and of so many snapshots, is reserved for transfers."""


def offload_placement(model: ModelConfig) -> Placement | None:
    """Return where weights, keys and values, and activations lie; None without a policy.

    Raises:
        ValueError: it is not executed, or it needs a disk and none is given, or the reverse.
    """
    placement = Placement(1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    if model.offload_policy is not None:
        placement = Placement.parse(model.offload_policy)
    if placement[8] > _ROUNDING or placement.kv_disk > _ROUNDING or not placement.kv_device:
        raise ValueError(
            "expected an offload_policy with kv_dev,kv_host and act_dev,act_host that add up to 100 each, "
            "and kv_dev above 0: new tokens stay on the device, and only weights lie on a disk, "
            f"got {model.offload_policy!r}"
        )
    if (placement.weights_disk > _ROUNDING) != (model.offload_disk is not None):
        raise ValueError(
            "expected offload_disk with an offload_policy that leaves weights to the disk, and only then, "
            f"got offload_disk={model.offload_disk!r} and {100 * placement.weights_disk:g} % on the disk"
        )
    return None if model.offload_policy is None else placement


def check_kv_shares(config: EngineConfig) -> None:
    """Raise ValueError for sizes of the KV cache that contradict the shares of ``offload_policy``.

    A share of the host without ``cpu_attention`` or the reverse, or of a device that has a size of its own.
    """
    placement, cache = offload_placement(config.model), config.cache
    if placement is None:
        return
    num_groups = _num_groups(config)
    if placement.activations_host and (num_groups == 1 or not any(spread(placement[6:], num_groups))):
        raise ValueError(
            "expected act_host of one group or more, and several groups (offload_num_batches, max_num_seqs), "
            f"got {config.model.offload_policy!r} with groups: {num_groups}"
        )
    if not placement.kv_host:
        if cache.cpu_attention is not None:
            raise ValueError(
                f"expected an offload_policy with kv_host above 0 with cpu_attention={cache.cpu_attention}, "
                f"got {config.model.offload_policy!r}"
            )
        return
    sizes = {"num_blocks": cache.num_blocks, "kv_cache_bytes": cache.kv_cache_bytes}
    given = [f"{name}={value}" for name, value in sizes.items() if value is not None]
    if cache.cpu_attention is None or given:
        raise ValueError(
            f"expected cpu_attention, the GiB of {100 * placement.kv_host:g} % of the keys and values, and "
            f"neither num_blocks nor kv_cache_bytes with offload_policy={config.model.offload_policy!r}, got "
            f"{', '.join((f'cpu_attention={cache.cpu_attention}', *given))}"
        )


def blocks_beside_host(config: EngineConfig, memory: MemoryPlan) -> int | None:
    """Return the blocks of the device, whose share ``offload_policy`` states; None if it states none.

    The share of the host is ``cpu_attention``. Padding and rings of the device are not in the shares.

    Args:
        memory: stores of the device, of whatever number of blocks.

    Raises:
        ValueError: see ``host_blocks``.
    """
    placement, size = offload_placement(config.model), config.cache.cpu_attention
    if placement is None or size is None or not placement.kv_host or not host_blocks(config.cache, memory):
        return None
    on_device = size * _GIB * placement.kv_device / placement.kv_host
    return max(1, int(on_device / memory.block_bytes + _ROUNDING))


def capped_note(config: EngineConfig, memory: MemoryPlan, max_len: int) -> tuple[str, ...]:
    """Return a note on blocks of the device that are left out, as requests cannot fill them; none without.

    Args:
        memory: stores of the engine.
        max_len: most tokens of a request.
    """
    cache, asked, name = config.cache, blocks_beside_host(config, memory), "offload_policy"
    if asked is None and cache.cpu_attention is not None and cache.kv_cache_bytes is not None:
        spare = max(0, cache.kv_cache_bytes - memory.total_bytes)
        asked, name = memory.num_blocks + spare // memory.block_bytes, "kv_cache_bytes"
    if asked is None or asked <= memory.num_blocks:
        return ()
    return (
        f"the device has {memory.num_blocks:,} of the {asked:,} KV blocks of {name}: {memory.max_num_seqs} "
        f"requests of {max_len:,} tokens fill no more, so the host's share stays empty",
    )


def streamed_layers(
    model: ModelConfig, layers: Sequence[nn.Module]
) -> tuple[list[nn.Module], frozenset[int]]:
    """Return the layers whose weights leave the device, and the indices among them of those on the disk."""
    placement = offload_placement(model)
    if placement is None:
        chosen = choose_layers(layers, model.cpu_offload_gb * _GIB) if model.cpu_offload_gb else []
        return chosen, frozenset()
    homes = spread(placement[:3], len(layers))
    on_disk = (place for place, home in enumerate(filter(None, homes)) if home == 2)
    return [layer for layer, home in zip(layers, homes) if home], frozenset(on_disk)


class Staged(NamedTuple):
    """Numbers of blocks and of snapshot rows that are reserved for transfers, half for each direction."""

    num_blocks: int
    num_rows: int


def staged_units(cache: CacheConfig | None, memory: MemoryPlan, num_filled: int) -> Staged:
    """Return what is reserved for transfers; nothing without a tier.

    Args:
        num_filled: blocks that a step fills, hence the most that it evicts.

    Raises:
        ValueError: the cache is too small.
    """
    if cache is None or cache.kv_offloading_size is None:
        return Staged(0, 0)
    per_step = cache.kv_offloading_blocks_per_step or num_filled
    num_blocks = num_rows = 0
    if memory.uses_blocks:
        num_blocks = 2 * min(per_step, memory.num_blocks // (2 * _SHARE))
        if not num_blocks:
            raise ValueError(
                f"expected {2 * _SHARE} blocks or more with kv_offloading_size, of which some are reserved "
                f"for transfers, got num_blocks={memory.num_blocks}"
            )
    if memory.uses_rows:
        num_rows = 2 * max(1, memory.num_snapshots // (2 * _SHARE))
        if memory.num_snapshots <= num_rows:
            raise ValueError(
                f"expected num_prefix_snapshots of {num_rows + 1} or more with kv_offloading_size, of which "
                f"{num_rows} are reserved for transfers, got {memory.num_snapshots}"
            )
    return Staged(num_blocks, num_rows)


def host_blocks(cache: CacheConfig | None, memory: MemoryPlan) -> int:
    """Return the blocks of running requests that the host holds; 0 without ``cpu_attention``.

    Raises:
        ValueError: there are no heads with blocks, or the size is below one block.
    """
    if cache is None or cache.cpu_attention is None:
        return 0
    if not memory.uses_blocks:
        raise ValueError(
            f"expected heads that store all tokens with cpu_attention={cache.cpu_attention}, got none"
        )
    total = int(cache.cpu_attention * _GIB)
    if total < memory.block_bytes:
        raise ValueError(
            f"expected cpu_attention of one block or more, {memory.block_bytes:,} bytes, got {total:,} bytes"
        )
    return total // memory.block_bytes


def check_runner(config: EngineConfig, device: torch.device, backend: str) -> None:
    """Raise ValueError for what steps in groups, or with blocks on the host, do not have."""
    in_groups, on_host = config.model.offload_num_batches > 1, config.cache.cpu_attention is not None
    if not (in_groups or on_host):
        return
    num_ranks, speculation = config.parallel.tensor_parallel_size, config.scheduler.speculation
    is_cut, mode = on_host and backend in CUT, config.cache.cpu_attention_mode
    refused = {
        f"graphs={backend!r}": backend != "eager" and not is_cut,
        f"device={device.type!r}": device.type not in ("cpu", "cuda") and not is_cut,
        f"cpu_attention_mode={mode!r}": is_cut and mode != HostDecodes.ATTEND.value,
        "offload_num_batches above 1": is_cut and in_groups,
        f"tensor_parallel_size={num_ranks}": num_ranks > 1,
        "a model that drafts": speculation is not None and speculation.is_by_model,
        "record_steps": config.run.record_steps is not None,
        "kv_offloading_size": on_host and config.cache.kv_offloading_size is not None,
        "fail_on_recompile": in_groups and config.graph.fail_on_recompile,
    }
    on_hpu = ", or one batch with mode 'attend' and graphs='hpu-compile' on an HPU" if on_host else ""
    without = ", ".join(["kv_offloading_size"] * on_host + ["fail_on_recompile"] * in_groups)
    for name in (each for each, is_refused in refused.items() if is_refused):
        raise ValueError(
            f"{'cpu_attention' if on_host else 'offload_num_batches above 1'}: expected graphs='eager' on "
            f"one CPU or GPU{on_hpu}, without a model that drafts, record_steps, {without}, got {name}"
        )


def runner_of(
    config: EngineConfig, executor: Executor, vocab_size: int, limits: StepLimits, max_len: int
) -> Runner:
    """Return what runs steps of requests of ``max_len`` tokens: whole, in groups, or with a host."""
    known, num_groups, host = (executor, vocab_size, limits.max_model_len), _num_groups(config), None
    if num_blocks := host_blocks(config.cache, executor.store.plan):
        mode, is_captured = HostDecodes(config.cache.cpu_attention_mode), executor.graphs.backend.name in CUT
        ahead = _ahead(config, executor.store.plan, max_len)
        host = attention_there(executor, num_blocks, mode, ahead, is_captured=is_captured)
    if num_groups > 1:
        homes = spread(placed[6:], num_groups) if (placed := offload_placement(config.model)) else ()
        away = [group for group, home in enumerate(homes) if home]
        return ZigZagRunner(*known, num_groups, limits.max_num_batched_tokens, host, away)
    return Runner(*known) if host is None else HostRunner(*known, host)


def _num_groups(config: EngineConfig) -> int:
    return min(config.model.offload_num_batches, config.scheduler.max_num_seqs)


def _ahead(config: EngineConfig, memory: MemoryPlan, max_len: int) -> GroupAhead | None:
    """The rows whose blocks are copied ahead; None where those of decodes never move, or with one group."""
    rows, num_groups = config.scheduler.max_num_seqs, _num_groups(config)
    if num_groups == 1 or config.cache.cpu_attention_mode == HostDecodes.ATTEND.value:
        return None
    return GroupAhead(num_groups, -(-rows // num_groups), -(-max_len // memory.block_size))


class HostSlots(NamedTuple):
    """Slots of the records of one rank.

    Attributes:
        number: of slots of the prefix cache.
        num_bytes: of one, on this rank.
        per_row: that a snapshot fills, the same on all ranks.
        num_swap: slots of preempted requests, after the others.
        share: of this rank in the bytes of a slot of all ranks.
    """

    number: int
    num_bytes: int
    per_row: int
    num_swap: int = 0
    share: float = 1.0

    @classmethod
    def of(cls, size_gib: float, memory: MemoryPlan, swap_gib: float = 0.0) -> HostSlots:
        """Return the slots of a tier: a block fills one, a snapshot as many as it needs.

        Args:
            size_gib: GiB of all ranks together.
            swap_gib: as many for preempted requests.

        Raises:
            ValueError: the size is below one record.
        """
        plans = [replace(memory, layers=layers, others=()) for layers in (memory.layers, *memory.others)]
        sizes = [plan.block_bytes if memory.uses_blocks else plan.row_bytes for plan in plans]
        per_row = max(-(-plan.row_bytes // size) if size else 1 for plan, size in zip(plans, sizes))
        # A rank without blocks only has the slots of snapshots.
        sizes = [size or max(1, -(-plan.row_bytes // per_row)) for plan, size in zip(plans, sizes)]
        total = int(size_gib * _GIB)
        if total < sum(sizes):
            raise ValueError(
                f"expected kv_offloading_size of one block or more, {sum(sizes):,} bytes, got {total:,} bytes"
            )
        swap = int(swap_gib * _GIB)
        if swap_gib and swap < sum(sizes):
            raise ValueError(
                f"expected swap_space of one block or more, {sum(sizes):,} bytes, got {swap:,} bytes"
            )
        return cls(total // sum(sizes), sizes[0], per_row, swap // sum(sizes), sizes[0] / sum(sizes))


def bucket_bytes(config: EngineConfig, cut: Sequence[LayerSpec], largest: BatchShape) -> int:
    """Return the bytes of the device that ``cpu_attention`` allocates for the tokens of a bucket.

    Args:
        cut: layers whose graphs are cut for it, if any.
        largest: bucket.
    """
    if config.cache.cpu_attention is None:
        return 0
    num_rows = largest.num_logits * config.scheduler.decode_len
    return BucketSizes.of(cut, largest.query_len, num_rows).on_device


def staged_bytes(config: EngineConfig, cut: Sequence[LayerSpec], records: MemoryPlan, in_tiles: int) -> int:
    """Return the most bytes of pinned memory of ``cpu_attention`` beside graphs that are cut for it.

    Args:
        cut: layers of these graphs.
        records: stores of the device, of whatever number of blocks.
        in_tiles: bytes of tiles.
    """
    scheduler, block_size = config.scheduler, records.block_size
    num_rows = scheduler.max_num_seqs * scheduler.decode_len
    of_rows = BucketSizes.of(cut, num_rows, num_rows).pinned(records.dtype_bytes)
    moves = fewest_blocks(block_moves(scheduler.max_num_batched_tokens, block_size), scheduler.max_num_seqs)
    return in_tiles + of_rows + moves * records.block_bytes


def link_bytes(
    config: EngineConfig,
    records: MemoryPlan,
    runtime: DeviceRuntime,
    max_len: int,
    cut: Sequence[LayerSpec] = (),
) -> int:
    """Return the bytes of the device that tiers allocate beside the stores, whatever the buckets.

    These are buffers of a link and what its graphs gather, or tiles of ``cpu_attention``, and its blocks
    where the device is a CPU.

    Args:
        records: stores of this rank, of whatever number of units.
        max_len: most tokens of a request that the model serves.
        cut: layers whose graphs are cut for ``cpu_attention``, if any.

    Raises:
        ValueError: ``cpu_attention`` is more than the free memory.
    """
    cache = config.cache
    if cache.cpu_attention is not None:
        num_blocks = int(cache.cpu_attention * _GIB) // max(1, records.block_bytes)
        ahead, is_apart = _ahead(config, records, max_len), not isinstance(runtime, CpuRuntime)
        planned = planned_bytes(records, num_blocks, is_apart=is_apart, ahead=ahead)
        free = host_memory().free if is_apart else runtime.free_bytes()
        beside = staged_bytes(config, cut, records, planned.in_tiles) if cut else 0
        if (needed := planned.on_host + (beside if is_apart else planned.in_tiles)) > free:
            raise ValueError(
                f"expected cpu_attention within the free memory of the host, {free:,} bytes, got {needed:,} "
                "bytes"
            )
        return planned.in_tiles if is_apart else needed
    if cache.kv_offloading_size is None:
        return 0
    sizes = *_record_bytes(records), _most_staged(config)
    if isinstance(runtime, CopiesStaged):
        staged = StagedSizes.of(*sizes)
        return staged.buffer_bytes + staged.working_bytes
    return staging_bytes(*sizes)


def _record_bytes(records: MemoryPlan) -> tuple[int, int]:
    """Bytes of a block, and of a row, on this rank; 0 of units that it does not have."""
    return (
        records.block_bytes if records.uses_blocks else 0,
        records.row_bytes if records.uses_rows else 0,
    )


def _most_staged(config: EngineConfig) -> int:
    """Most blocks that a step moves in one direction, whatever the number of blocks turns out to be."""
    cache = config.cache
    filled = block_moves(config.scheduler.max_num_batched_tokens, config.block_size)
    per_step = cache.kv_offloading_blocks_per_step or filled
    return per_step if cache.num_blocks is None else max(1, min(per_step, cache.num_blocks // (2 * _SHARE)))


def host_link(
    config: EngineConfig,
    store: KVStore,
    runtime: DeviceRuntime,
    membership: Membership | None,
    backend: CaptureBackend,
    shape: BatchShape,
) -> HostLink | StreamLink | StagedLink | None:
    """Allocate the records of this rank; None without a tier. All ranks call it at the same time.

    Args:
        membership: this rank among several.
        backend: captures graphs of transfers.
        shape: the largest bucket, which they are named after.

    Raises:
        ValueError: the sizes are below one record, or above the free memory of the host.
    """
    cache = config.cache
    if cache.kv_offloading_size is None:
        return None
    slots = HostSlots.of(cache.kv_offloading_size, store.plan, cache.swap_space or 0.0)
    number, most = slots.number + slots.num_swap, _most_staged(config)
    pinned = StagedSizes.of(*_record_bytes(store.plan), most).buffer_bytes
    needed = number * slots.num_bytes + (pinned if isinstance(runtime, CopiesStaged) else 0)
    _check_host(cache, needed, membership)
    records = block_units(store), row_units(store), number, slots.num_bytes
    link: HostLink | StreamLink | StagedLink
    if isinstance(runtime, CopiesAside):
        link = StreamLink(*records, runtime, most)
    elif isinstance(runtime, CopiesStaged):
        link = StagedLink(*records, runtime, most, backend, shape)
    else:
        link = HostLink(*records, most)
    if membership is not None and cache.kv_offloading_disk is not None:
        link.disk = _rank_disk(config, store.plan, slots, config.block_size, link, membership)
    return link


def _check_host(cache: CacheConfig, needed: int, membership: Membership | None) -> None:
    """Raise ValueError if the records of the ranks on one machine are more than its free memory.

    All ranks measure it before any of them allocates.
    """
    own = platform.node(), needed, host_memory().free
    ranks = [own] if membership is None else membership.collect(own)
    for name, _, _ in ranks:
        beside = [each for each in ranks if each[0] == name]
        needed, free = sum(each[1] for each in beside), min(each[2] for each in beside)
        if needed > free:
            together = " and swap_space together" if cache.swap_space else ""
            raise ValueError(
                f"expected kv_offloading_size{together} within the free memory of the host, {free:,} bytes, "
                f"got {needed:,} bytes{'' if membership is None else f' of the ranks on {name}'}"
            )


def _rank_disk(
    config: EngineConfig,
    memory: MemoryPlan,
    slots: HostSlots,
    block_size: int,
    link: HostRecords,
    membership: Membership,
) -> RankDisk:
    """Return the folder of this rank, which is opened by an order; all ranks call it at the same time.

    Raises:
        ValueError: not even one record fits.
    """
    cache, ranks = config.cache, membership.ranks
    assert cache.kv_offloading_disk is not None, "expected a folder"
    assert cache.kv_offloading_disk_size is not None, "expected its size"
    own = OwnFolder(
        Path(cache.kv_offloading_disk),
        ranks.rank,
        ranks.size,
        int(cache.kv_offloading_disk_size * _GIB * slots.share),
        slots.num_bytes * (slots.per_row if memory.uses_rows else 1),
        block_size,
    )
    try:
        segment_bytes(own.limit, own.largest)
    except ValueError as error:
        raise ValueError(f"{error} for rank {own.rank} of {own.size}") from None
    exchange = membership.exchange_aside(config.parallel.timeout_s)
    return (RankDisk if ranks.rank else LeadingDisk)(own, link.memory, exchange)


def attach_disk(engine: Engine, config: EngineConfig) -> tuple[str, ...]:
    """Connect the tier in host memory to its folder on disk, if it has one; returns notes.

    Raises:
        ValueError: the folder cannot be written, or is too small.
    """
    cache, tiers, link = config.cache, engine.scheduler.allocations.tiers, engine.runner.executor.link
    if cache.kv_offloading_disk is None or cache.kv_offloading_disk_size is None or tiers is None:
        return ()
    assert isinstance(link, HostRecords), "expected records in host memory"
    path, limit = Path(cache.kv_offloading_disk), int(cache.kv_offloading_disk_size * _GIB)
    check_directory("kv_offloading_disk", path)
    largest = tiers.sizes.slot_bytes * (tiers.sizes.slots_per_row if tiers.sizes.row_bytes else 1)
    digest, disk = records_digest(engine, config), link.disk
    try:
        access: DiskAccess
        if disk is None:
            folder = SegmentFolder(path, digest, limit, largest)
            free = shutil.disk_usage(path).free + folder.num_bytes
            if limit > free:
                folder.release()
                raise ValueError(
                    f"expected kv_offloading_disk_size within the free space of {path}, {free:,} bytes, got "
                    f"{limit:,} bytes"
                )
            access = DiskThreads(folder, link.memory)
        else:
            assert isinstance(disk, LeadingDisk), "expected the folder of rank 0"
            # Close it before the worker ranks are stopped: its exchanges need them.
            weakref.finalize(engine.runner.executor, disk.close)
            if (problem := engine.runner.open_disk(digest)) is not None:
                raise ValueError(problem)
            access = disk
        tiers.disk = DiskTier(access, tiers.host, link.slots.shape[1], engine.scheduler.limits.block_size)
    except OSError as error:
        raise ValueError(
            f"expected kv_offloading_disk to be a folder that can be read and written, got {path}: "
            f"{error.strerror}"
        ) from error
    if not is_in_memory(path):
        return ()
    note = f"warning: kv_offloading_disk={path} is in memory (tmpfs), so it is lost with the machine"
    _log.warning("%s", note.removeprefix("warning: "))
    return (note,)


def is_in_memory(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether a folder is in a file system without a disk.

    Args:
        mounts: the system's list of file systems.
    """
    if not mounts.is_file():
        return False
    kinds = {Path(line.split()[1]): line.split()[2] for line in mounts.read_text().splitlines()}
    resolved = path.resolve()
    kind = next((kinds[each] for each in (resolved, *resolved.parents) if each in kinds), "")
    return kind in ("tmpfs", "ramfs")


def attach_tiers(
    cache: CacheConfig, memory: MemoryPlan, limits: StepLimits, scheduler: Scheduler, link: Link | None
) -> None:
    """Connect a scheduler to host memory, if it has any: the prefix cache, and preempted requests."""
    if num_host_blocks := host_blocks(cache, memory):
        moves = block_moves(limits.max_num_batched_tokens, limits.block_size)
        fewest = fewest_blocks(moves, limits.max_num_seqs)
        scheduler.allocations.host = HostBlocks(num_host_blocks, limits.block_size, fewest)
    if cache.kv_offloading_size is None or link is None:
        return
    slots = HostSlots.of(cache.kv_offloading_size, memory, cache.swap_space or 0.0)
    allocations = scheduler.allocations
    # The executor has the link: allocations and their parts refer to each other.
    stage = Stage(weakref.proxy(link), allocations.staged_units, allocations.add_copy)
    tiers = PrefixTiers(
        HostTier(slots.number, limits.block_size, ORDERS[cache.kv_offloading_eviction_policy](slots.number)),
        stage,
        RecordSizes(
            max(1, memory.block_bytes) if memory.uses_blocks else 0,
            max(1, memory.row_bytes) if memory.uses_rows else 0,
            slots.num_bytes,
            slots.per_row,
        ),
        WritePolicy(cache.kv_offloading_write_policy),
        min_tokens=cache.kv_offloading_min_tokens,
    )
    allocations.attach(tiers)
    if allocations.prefixes is not None:
        allocations.prefixes.holds.idle_s = cache.context_idle_seconds
    if slots.num_swap:
        room = range(slots.number, slots.number + slots.num_swap)
        tiers.swap = SwapSpace(stage, room, slots.per_row if memory.uses_rows else 0, slots.num_bytes)
        mode = PreemptionMode(cache.preemption_mode)
        scheduler.swapping = Swapping(allocations, tiers.swap, mode, tiers.load_policy)
