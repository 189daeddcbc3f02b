"""``hpu-duo plan-offload``: placement of weights, keys and values, and activations."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpu_duo.cli.options import Json, grouped, model_option, option_in
from hpu_duo.cli.planning.hardware import WEIGHTS
from hpu_duo.cli.terminal import Waiting, parse_rate, show_bytes, user_errors
from hpu_duo.config.engine import SchedulerConfig

if TYPE_CHECKING:
    from hpu_duo.planning.offload import Found, OffloadMachine, OffloadModel, OffloadWork, Placement, Policy

_machine_option, _work_option = option_in("Machine"), option_in("Requests")
_GIB = 1 << 30
_LINK, _DISK_RATE = "32GB/s", "3GB/s"


@dataclass(frozen=True)
class MachineOptions:
    """Options of the machine."""

    hardware: Annotated[
        str, _machine_option("gaudi2, gaudi3, or t4: an NVIDIA T4 by FlexGen's published fit.")
    ] = "gaudi3"
    device_memory: Annotated[
        float | None, _machine_option("GiB of the device.", metavar="GIB", show_default="the hardware's")
    ] = None
    host_memory: Annotated[
        float | None, _machine_option("GiB of host memory.", metavar="GIB", show_default="none; 160 of a t4")
    ] = None
    disk_size: Annotated[
        float | None, _machine_option("GiB of a disk.", metavar="GIB", show_default="none; 1200 of a t4")
    ] = None
    link: Annotated[
        str | None,
        _machine_option("Bytes a second of each way to the device.", metavar="RATE", show_default=_LINK),
    ] = None
    disk_rate: Annotated[
        str | None,
        _machine_option(
            "Bytes a second that the disk is read and written with.", metavar="RATE", show_default=_DISK_RATE
        ),
    ] = None
    host_attention: Annotated[
        float | None,
        _machine_option(
            "Operations a second, in 10**9, of decodes that attend on the host.",
            metavar="GFLOPS",
            show_default="decodes attend on the device",
        ),
    ] = None
    measure: Annotated[
        Path | None,
        _machine_option(
            "Measure the rates of this machine instead, with files in this folder.",
            metavar="DIR",
            show_default="not measured",
        ),
    ] = None
    device: Annotated[str, _machine_option("What --measure measures: auto, hpu, cuda or cpu.")] = "auto"

    def machine(self, weights: Any) -> OffloadMachine:
        """Return its memories and rates.

        Raises:
            ValueError: an unknown name, or a value out of range.
        """
        from hpu_duo.planning import find_hardware
        from hpu_duo.planning.model import HARDWARE_NAMES
        from hpu_duo.planning.offload import T4, on_hardware

        for name in ("device_memory", "host_memory", "disk_size", "host_attention"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"expected --{name.replace('_', '-')} of 0 or more, got {value}")
        if self.hardware not in (*HARDWARE_NAMES, "t4"):
            raise ValueError(f"expected --hardware {', '.join(HARDWARE_NAMES)} or t4, got {self.hardware!r}")
        self._check_rates()
        device, host, disk = (
            None if size is None else size * _GIB
            for size in (self.device_memory, self.host_memory, self.disk_size)
        )
        if self.measure is not None:
            from hpu_duo.startup.placement import offload_machine

            if device is None:
                raise ValueError("expected --device-memory with --measure, got none")
            if not self.measure.is_dir():
                raise ValueError(f"expected --measure to be an existing folder, got {str(self.measure)!r}")
            with Waiting("measuring rates"):
                return offload_machine(
                    self.device,
                    self.measure,
                    device_memory=device,
                    host_memory=host or 0.0,
                    disk=disk or 0.0,
                )
        if self.hardware == "t4":
            return replace(
                T4,
                device_memory=T4.device_memory if device is None else device,
                host_memory=T4.host_memory if host is None else host,
                disk=T4.disk if disk is None else disk,
                flexgen_memory=False,
            )
        disk_rate = parse_rate("--disk-rate", self.disk_rate or _DISK_RATE)
        return on_hardware(
            find_hardware(self.hardware),
            weights,
            device_memory=device,
            host_memory=host or 0.0,
            disk=disk or 0.0,
            link=parse_rate("--link", self.link or _LINK),
            disk_read=disk_rate,
            disk_write=disk_rate,
            host_attention=1e9 * (self.host_attention or 1.0),
        )

    def _check_rates(self) -> None:
        """Raise ValueError for rates beside those that --measure or a T4 has."""
        if self.measure is None and self.hardware != "t4":
            return
        for name in ("link", "disk_rate", "host_attention"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"expected --{name.replace('_', '-')} only without --measure and --hardware t4, which "
                    f"have rates of their own, got {getattr(self, name)!r}"
                )

    @property
    def ways(self) -> bool | None:
        """Whether decodes attend on the host: never, or whichever is faster (None)."""
        return None if self.host_attention or self.measure or self.hardware == "t4" else False


@dataclass(frozen=True)
class WorkOptions:
    """Options of the requests."""

    prompt_len: Annotated[int, _work_option("Tokens of each prompt.")] = 512
    output_len: Annotated[int, _work_option("Tokens of each output.")] = 32
    dtype: Annotated[str, WEIGHTS] = "bf16"
    kv_cache_dtype: Annotated[str, _work_option("Format of keys and values, or bf16.")] = "bf16"
    kv_share: Annotated[
        float, _work_option("Share of each request's tokens that are stored, by a KV budget such as H2O's.")
    ] = 1.0
    max_batch: Annotated[int, _work_option("Most rows that a layer computes at once.")] = 1024
    offload_policy: Annotated[
        str,
        _work_option(
            "auto, or six percentages w_dev,w_host,kv_dev,kv_host,act_dev,act_host (the rest is on the disk) "
            "to predict, with --batch.",
            metavar="POLICY",
        ),
    ] = "auto"
    batch: Annotated[
        str | None,
        _work_option(
            "Rows x batches of the policy to predict, as 32x5.", metavar="NxM", show_default="searched"
        ),
    ] = None

    def work(self) -> OffloadWork:
        """Return the requests.

        Raises:
            ValueError: a value is out of range.
        """
        from hpu_duo.planning.offload import OffloadWork

        if self.max_batch < 1:
            raise ValueError(f"expected --max-batch >= 1, got {self.max_batch}")
        if (self.offload_policy == "auto") != (self.batch is None):
            raise ValueError(
                "expected --batch with percentages of --offload-policy, and only then, "
                f"got {self.batch!r} and {self.offload_policy!r}"
            )
        return OffloadWork(self.prompt_len, self.output_len, self.kv_share)

    def sizes(self) -> tuple[int, int]:
        """Return rows of a batch and batches of ``--batch``.

        Raises:
            ValueError: it is not like 32x5.
        """
        rows, _, number = (self.batch or "").partition("x")
        if not (rows.isdecimal() and number.isdecimal() and int(rows) and int(number)):
            raise ValueError(f"expected --batch as rows x batches such as 32x5, got {self.batch!r}")
        return int(rows), int(number)


@grouped
def plan_offload(
    *,
    model: Annotated[
        Path,
        model_option("Directory with a config.json, or the file; no weights needed.", needs_weights=False),
    ],
    machine: MachineOptions,
    requests: WorkOptions,
    as_json: Json = False,
) -> None:
    """Find where weights, keys and values, and activations should lie for the most tokens a second.

    A linear programme finds the shares of the device, the host and the disk for each size of batches, and a
    simulated schedule judges them in whole layers and blocks. Rates of Gaudi come from public figures.
    """
    with user_errors((ValueError, OSError)):
        from hpu_duo.planning import Format
        from hpu_duo.planning.kv_formats import parse_kv_format
        from hpu_duo.planning.offload import PolicySearch, offload_model
        from hpu_duo.planning.read_model import read_model

        weights, kv_format = Format.parse(requests.dtype), parse_kv_format(requests.kv_cache_dtype)
        work, found_machine = requests.work(), machine.machine(weights)
        sizes = offload_model(read_model(model), weights, kv_format)
        search = PolicySearch(sizes, work, found_machine, machine.ways, requests.max_batch)
        if requests.offload_policy == "auto":
            found = search.best()
            gains: dict[str, float] | None = search.gains(found)
        else:
            found, gains = search.judge(requests.offload_policy, *requests.sizes()), None
    if as_json:
        typer.echo(json.dumps(_fields(found, gains, sizes, work, found_machine), indent=2))
    else:
        _show(found, gains, sizes, work, found_machine)


def _fields(
    found: Found,
    gains: dict[str, float] | None,
    sizes: OffloadModel,
    work: OffloadWork,
    machine: OffloadMachine,
) -> dict[str, Any]:
    policy = found.policy
    return {
        "batch_size": policy.batch_size,
        "num_batches": policy.num_batches,
        "placement": policy.placement._asdict(),
        "host_attention": policy.host_attention,
        "tokens_per_s": found.tokens_per_s,
        "bound_tokens_per_s": found.bound,
        "binds": found.binds,
        "full": list(found.full),
        "peak_bytes": found.peak_bytes,
        "weight_bytes": _weight_bytes(policy.placement, sizes),
        "serve_with": _serve_with(policy, sizes, work),
        "tokens_per_s_of_one_gib": gains,
        "model": asdict(sizes),
        "machine": {name: value if value < float("inf") else None for name, value in _numbers(machine)},
    }


def _weight_bytes(placement: Placement, sizes: OffloadModel) -> dict[str, float]:
    """Bytes of weights in each memory, with those that always stay on the device."""
    in_layers = sizes.layer_bytes * sizes.num_layers
    shares = dict(zip(("device", "host", "disk"), placement))
    return {
        name: share * in_layers + (sizes.resident_bytes if name == "device" else 0.0)
        for name, share in shares.items()
    }


def _kv_blocks(policy: Policy, work: OffloadWork) -> tuple[int, int]:
    """Return the KV blocks of all rows on the device and on the host."""
    from hpu_duo.planning.offload import BLOCK_SIZE

    total = policy.num_rows * -(-work.stored_end // BLOCK_SIZE)
    on_device = math.ceil(total * policy.placement.kv_device - 1e-6)
    return on_device, total - on_device


def _why_not_served(policy: Policy, work: OffloadWork) -> str | None:
    """Return why no engine executes a policy; None for one that an engine executes."""
    from hpu_duo.kv.allocations import block_moves
    from hpu_duo.kv.host_blocks import fewest_blocks
    from hpu_duo.planning.offload import BLOCK_SIZE

    placement = policy.placement
    # Blocks on the host are those of whole requests.
    attends_there = work.kv_share == 1 and not placement.kv_disk
    on_device, on_host = _kv_blocks(policy, work)
    if on_host and not (attends_there and on_device):
        return "keys and values on the disk, or on the host with a KV budget or none on the device"
    if placement.activations_disk > 1e-9 or (placement.activations_host > 1e-9 and policy.num_batches == 1):
        return "activations on the disk, or those of a single batch on the host"
    tokens = SchedulerConfig.max_num_batched_tokens
    fewest = fewest_blocks(block_moves(tokens, BLOCK_SIZE), policy.num_rows)
    if on_host and on_device < fewest:
        return (
            f"the device has {on_device} KV blocks, and steps of {tokens:,} tokens and {policy.num_rows} "
            f"rows need {fewest}"
        )
    return None


def _kv_shares(on_device: int, on_host: int, block_bytes: float) -> tuple[float, float]:
    """Return the percentage of the device and the GiB of the host for at least so many blocks."""
    exact = 1e4 * on_device / (on_device + on_host)
    # Rounding up the smaller share adds the fewest blocks.
    percent = (math.floor(exact + 1e-6) if on_device > on_host else math.ceil(exact - 1e-6)) / 100
    most = max(on_host, on_device * (100 - percent) / percent)
    return percent, math.ceil(1e6 * most * block_bytes / _GIB) / 1e6


def _serve_with(policy: Policy, sizes: OffloadModel, work: OffloadWork) -> str | None:
    """Return the options of an engine that executes a policy; None for one that is only planned."""
    from hpu_duo.planning.offload import BLOCK_SIZE

    if _why_not_served(policy, work) is not None:
        return None
    device, host, disk, *_ = policy.placement
    blocks = _kv_blocks(policy, work)
    has_disk = disk > 1e-4
    on_device = (math.floor if has_disk else round)(1e4 * device) / 100
    on_host = math.floor(1e4 * host) / 100 if has_disk else round(100 - on_device, 2)
    of_kv, gib, options = 100.0, 0.0, []
    if blocks[1]:
        of_kv, gib = _kv_shares(*blocks, BLOCK_SIZE * sizes.kv_bytes * sizes.num_layers)
    of_act = round(1e4 * policy.placement.activations_device) / 100
    if min(on_device, of_kv, of_act) < 100:
        shares = (on_device, on_host), *((each, round(100 - each, 2)) for each in (of_kv, of_act))
        options.append(f"--offload-policy {','.join(f'{each:g}' for pair in shares for each in pair)}")
    if has_disk:
        options.append("--offload-disk DIR")
    if of_kv < 100:
        mode = "attend" if policy.host_attention else "move"
        options.append(f"--cpu-attention {gib:.6f}".rstrip("0").rstrip("."))
        options.append(f"--cpu-attention-mode {mode} --no-enable-prefix-caching")
    if of_kv == 100 or policy.num_batches > 1:
        options.append(f"--offload-num-batches {policy.num_batches}")
    return " ".join((*options, f"--max-num-seqs {policy.num_rows}"))


def _numbers(machine: OffloadMachine) -> list[tuple[str, float]]:
    return [(name, value) for name, value in asdict(machine).items() if not isinstance(value, tuple)]


def _show(
    found: Found,
    gains: dict[str, float] | None,
    sizes: OffloadModel,
    work: OffloadWork,
    machine: OffloadMachine,
) -> None:
    policy = found.policy
    where = "the host" if policy.host_attention else "the device"
    typer.echo(f"batches          {policy.batch_size} rows x {policy.num_batches}")
    typer.echo(f"placement        {policy.placement}   (device / host / disk)")
    typer.echo(f"decodes attend   on {where} to what does not lie on the device")
    typer.echo(
        f"predicted        {found.tokens_per_s:,.2f} tokens/s ({found.bound:,.2f} if layers could be split)"
    )
    full = f"; full: {', '.join(found.full)}" if found.full else ""
    typer.echo(f"binds            {found.binds}{full}")
    limits = {"device": machine.device_memory, "host": machine.host_memory, "disk": machine.disk}
    used = ", ".join(
        f"{name} {show_bytes(size)} of {show_bytes(limits[name])}" for name, size in found.peak_bytes.items()
    )
    typer.echo(f"memory           {used}")
    weights = _weight_bytes(policy.placement, sizes).items()
    typer.echo(f"weights          {', '.join(f'{name} {show_bytes(size)}' for name, size in weights)}")
    given = _serve_with(policy, sizes, work)
    why = f"planned only: {_why_not_served(policy, work)}"
    typer.echo(f"serve with       {why if given is None else f'{given}   (on a CPU or GPU)'}")
    if gains is not None:
        more = ", ".join(f"{name} {gain:+,.2f}" for name, gain in gains.items())
        typer.echo(f"tokens/s gained by one GiB more: {more}")
