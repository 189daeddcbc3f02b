"""Placement of weights by the policy search, for a model that does not fit its device, and rates it needs."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpu_duo.config.limits import DeviceBudget
from hpu_duo.device import resolve_device, runtime_for
from hpu_duo.device.runtime import host_memory
from hpu_duo.modeling.loading import read_config, resolve_dtype
from hpu_duo.modeling.quantised.config import stored_weight_bytes
from hpu_duo.planning import Format
from hpu_duo.planning.offload import (
    T4,
    Formula,
    Found,
    OffloadMachine,
    OffloadModel,
    OffloadWork,
    Placement,
    PolicySearch,
    offload_model,
)
from hpu_duo.planning.read_model import read_model, stored_bytes
from kernels_ref import PLAIN
from kernels_ref.formats import format_of

if TYPE_CHECKING:
    from hpu_duo.config.engine import EngineConfig

_log = logging.getLogger(__name__)

AUTO = "auto"
SIZES = (8 << 20, 256 << 20)
"""Bytes of the copies that are measured: about a block, and a whole context."""
_QUICK = 64 << 20
_OUTPUT_LEN, _PROMPT_LEN = 32, 512
_ON_DEVICE = Placement(1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)


def placed(config: EngineConfig) -> tuple[EngineConfig, tuple[str, ...]]:
    """Return a configuration whose ``offload_policy`` is no longer "auto", and notes on the choice.

    All weights stay on the device if they fit there with one request. Otherwise the search decides which
    layers lie on the host, and on the disk if there is one, how many groups a step has, and how many rows,
    ``max_num_seqs`` at most; ``max_num_batched_tokens`` is then that of a group.

    Raises:
        ValueError: the options do not go with "auto", no placement fits, scipy is not installed, or the
            search cannot read the sizes of a model whose weights do not fit.
    """
    if config.model.offload_policy != AUTO:
        return config, ()
    _check(config)
    device = resolve_device(config.model.device)
    resident = replace(config, model=replace(config.model, offload_policy=None, offload_disk=None))
    runtime = runtime_for(device)
    budget = DeviceBudget(
        runtime.total_bytes(),
        runtime.used_bytes(),
        runtime.free_bytes(),
        config.cache.device_memory_utilization,
    )
    work, left = _work(config), float(max(1, budget.left_bytes))
    try:
        sizes = _sizes(config, device)
    except ValueError as error:
        weights = _weight_bytes(config, device)
        if weights > left:
            raise
        note = f"offload_policy=auto: all {weights:,} bytes of weights stay on the device: {error}"
        return resident, (note,)
    if sizes is None:
        return resident, ("offload_policy=auto: layers have states, so all weights stay on the device",)
    # Rates do not decide whether it fits.
    if Formula(sizes, work, replace(T4, device_memory=left, flexgen_memory=False), 1, 1, False).fits(
        _ON_DEVICE
    ):
        return resident, ()
    if device.type == "hpu":
        raise ValueError(
            f"expected a model that fits the {left:,.0f} bytes of the HPU with offload_policy='auto', as "
            f"weights lie on the host of CPUs and GPUs only, got {config.model.path}"
        )
    found = _search(config, sizes, work, _measured(config, device, left))
    return _with(config, found)


def _check(config: EngineConfig) -> None:
    others = {
        "cpu_attention": config.cache.cpu_attention is not None,
        f"tensor_parallel_size={config.parallel.tensor_parallel_size}": (
            config.parallel.tensor_parallel_size > 1
        ),
    }
    for name, is_set in others.items():
        if is_set:
            raise ValueError(
                f"expected offload_policy='auto', which places weights alone, on one device, got {name}"
            )


def _sizes(config: EngineConfig, device: torch.device) -> OffloadModel | None:
    """The sizes of the model as it is served; None for one whose layers have states."""
    path = Path(config.model.path)
    size = read_model(path)
    if any(size.states):
        return None
    dtype = resolve_dtype(config.model.dtype, read_config(path), device.type)
    name, scale = config.cache.kv_cache_dtype, dtype.itemsize / 2
    kv_format = PLAIN if name == AUTO else format_of(name)
    weights, is_plain = Format.BF16, True
    if config.model.quantization in ("int8", "int4", "fp8"):
        weights, is_plain = Format.parse(config.model.quantization), False
    elif config.model.quantization_execution != "dequantise" and (own := stored_bytes(path / "config.json")):
        size, is_plain = replace(size, stored_bytes=own), False
    model = offload_model(size, weights, kv_format)
    return replace(
        model,
        layer_bytes=size.layer_bytes(weights) * (scale if is_plain else 1.0),
        kv_bytes=model.kv_bytes * (scale if kv_format.is_plain else 1.0),
        resident_bytes=model.resident_bytes * scale,
    )


def _weight_bytes(config: EngineConfig, device: torch.device) -> int:
    """The bytes of a checkpoint's weights in the dtype that they are served in, by its files."""
    path = Path(config.model.path)
    own = read_config(path)
    served, stored = resolve_dtype(config.model.dtype, own, device.type), resolve_dtype("auto", own)
    return stored_weight_bytes(path) * served.itemsize // stored.itemsize


def _work(config: EngineConfig) -> OffloadWork:
    """Requests of ``max_model_len`` tokens, of which the last are the output."""
    total = config.scheduler.max_model_len or _PROMPT_LEN + _OUTPUT_LEN
    output = min(_OUTPUT_LEN, max(1, total // 2))
    return OffloadWork(max(1, total - output), output)


def _measured(config: EngineConfig, device: torch.device, left: float) -> OffloadMachine:
    folder, disk = config.model.offload_disk, 0
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(folder).free
    # What a CPU as device does not use is its host's.
    host = host_memory().free - (left if device.type == "cpu" else 0.0)
    return offload_machine(
        device,
        None if folder is None else Path(folder),
        device_memory=left,
        host_memory=max(0.0, host),
        disk=float(disk),
        size=_QUICK,
    )


def _search(config: EngineConfig, sizes: OffloadModel, work: OffloadWork, machine: OffloadMachine) -> Found:
    """The fastest policy for as many rows as fit, ``max_num_seqs`` at most."""
    search = PolicySearch(sizes, work, machine, False, is_served=True)
    speculation = config.scheduler.speculation
    one_group = (
        (speculation is not None and speculation.is_by_model)
        or config.run.record_steps is not None
        or config.graph.fail_on_recompile
    )
    rows = config.scheduler.max_num_seqs
    while rows:
        given = config.model.offload_num_batches
        numbers = [given] if given > 1 or one_group else [1 << n for n in range(rows.bit_length())]
        found = [search.whole(-(-rows // number), number, False) for number in numbers if number <= rows]
        fitting = [each for each in found if each is not None]
        if fitting:
            return max(fitting, key=lambda one: one.tokens_per_s)
        rows //= 2
    raise ValueError(
        f"expected memories that hold the model and one request of {work.prompt_len + work.output_len} "
        f"tokens with offload_policy='auto', got {machine.device_memory:,.0f} bytes of device, "
        f"{machine.host_memory:,.0f} of host and {machine.disk:,.0f} of disk"
    )


def _with(config: EngineConfig, found: Found) -> tuple[EngineConfig, tuple[str, ...]]:
    """The configuration that executes a policy."""
    policy = found.policy
    device, host, disk, *_ = policy.placement
    on_device, on_host = round(100 * device, 2), round(100 * host, 2)
    if not disk:
        on_host = round(100 - on_device, 2)
    percentages = f"{on_device:g},{on_host:g},100,0,100,0"
    number, scheduler = policy.num_batches, config.scheduler
    rows = min(policy.num_rows, scheduler.max_num_seqs)
    note = (
        f"offload_policy=auto: {percentages} in {number} groups of {policy.batch_size} rows, predicted "
        f"{found.tokens_per_s:,.4g} tokens/s for requests of max_model_len tokens; binds: {found.binds}"
    )
    _log.info("%s", note)
    return replace(
        config,
        model=replace(
            config.model,
            offload_policy=percentages,
            offload_disk=config.model.offload_disk if disk else None,
            offload_num_batches=number,
        ),
        scheduler=replace(
            scheduler,
            max_num_seqs=rows,
            max_num_batched_tokens=max(rows, number * scheduler.max_num_batched_tokens),
        ),
    ), (note,)


def offload_machine(
    device: str | torch.device,
    folder: Path | None,
    *,
    device_memory: float,
    host_memory: float,
    disk: float,
    size: int = SIZES[1],
) -> OffloadMachine:
    """Measure the rates that the placement of weights depends on; each is the fastest of three.

    Products of matrices in bfloat16, or in float32 on a CPU that is faster with it, of many rows and of few,
    attention of decodes in float32 on device and host, and copies of ``size`` bytes.

    Args:
        device: a device, or a name of ``hpu_duo.device``.
        folder: of files that are written and read; they are removed. None without a disk.
        device_memory, host_memory, disk: bytes that may be used.

    Raises:
        OSError: the folder cannot be written.
    """
    place = str(resolve_device(device))
    down, up = link_rates(place, size, pinned=place.startswith("cuda"))
    written, read, _ = (1.0, 1.0, False) if folder is None else disk_rates(folder, size)
    few, many, side = 32, 1024, 2048
    dtypes = (torch.float32, torch.bfloat16) if place == "cpu" else (torch.bfloat16,)
    dtype = max(dtypes, key=partial(_matrix_rate, place, few, side // 8))
    rates = {rows: _matrix_rate(place, rows, side, dtype) for rows in (few, many)}
    return OffloadMachine(
        device_memory=device_memory,
        host_memory=host_memory,
        disk=disk,
        up=up,
        down=down,
        down_kv=down,
        disk_read=read,
        disk_read_weights=read,
        disk_write=written,
        disk_write_kv=written,
        prefill_matrix=rates[many],
        prefill_attention=rates[many],
        decode_matrix=rates[few],
        decode_attention=_attention_rate(place),
        host_attention=_attention_rate("cpu"),
    )


def _matrix_rate(device: str, rows: int, side: int, dtype: torch.dtype) -> float:
    """Operations a second of a product [rows, side] x [side, side]."""
    left, right = (torch.ones(size, side, dtype=dtype, device=device) for size in (rows, side))

    def multiply() -> None:
        (left @ right)[:1, :1].cpu()

    return _rate(2 * rows * side * side, multiply)


def _attention_rate(device: str, rows: int = 8, heads: int = 8, keys: int = 2048, dim: int = 128) -> float:
    """Operations a second of decodes that attend to their own keys, in float32."""
    query = torch.ones(rows, heads, 1, dim, device=device)
    stored = torch.ones(rows, heads, keys, dim, device=device)

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, stored, stored)[:1, :1].cpu()

    return _rate(4 * rows * heads * keys * dim, attend)


def _rate(size: int, move: Callable[[], None]) -> float:
    """Bytes, or operations, a second: the fastest of three."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        move()
        best = min(best, time.perf_counter() - began)
    return size / best


def link_rates(device: str, size: int, *, pinned: bool) -> tuple[float, float]:
    """Bytes a second to the host and from there."""
    on_device = torch.ones(size, dtype=torch.uint8, device=device)
    on_host = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)

    def up() -> None:
        on_host.copy_(on_device)

    def down() -> None:
        on_device.copy_(on_host)
        on_device[:1].cpu()  # waits for the copy

    return _rate(size, up), _rate(size, down)


def disk_rates(folder: Path, size: int) -> tuple[float, float, bool]:
    """Bytes a second written to a file and read from it, and whether reads are direct."""
    with mmap.mmap(-1, size) as memory, tempfile.NamedTemporaryFile(dir=folder) as file:
        memory.write(os.urandom(1 << 20) * (size >> 20))

        def write() -> None:
            os.pwrite(file.fileno(), memory, 0)
            os.fsync(file.fileno())

        written = _rate(size, write)
        try:
            source, is_direct = os.open(file.name, os.O_RDONLY | getattr(os, "O_DIRECT", 0)), True
        except OSError:
            source, is_direct = os.open(file.name, os.O_RDONLY), False
        try:

            def read() -> None:
                os.preadv(source, [memory], 0)

            return written, _rate(size, read), is_direct
        finally:
            os.close(source)
