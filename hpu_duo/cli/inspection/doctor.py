"""``hpu-duo doctor``: the devices and backends that work on this machine, and why others do not."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hpu_duo.cli.arguments.loading import load_model
from hpu_duo.cli.arguments.model_names import model_option
from hpu_duo.cli.arguments.option_groups import grouped
from hpu_duo.cli.arguments.options import EngineOptions, HeadOptions, Json
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.cli.terminal.sizes import show_bytes
from hpu_duo.cli.terminal.streams import mark
from hpu_duo.limit_config import SchedulerConfig

_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
_OPTIONAL = ("optimum-habana", "habana-torch-plugin", "triton")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: versions, devices, cpu, graphs, collectives or model.
        is_usable: whether the subject works; None for a plain fact.
    """

    topic: str
    name: str
    is_usable: bool | None
    detail: str


@grouped
def doctor(
    *,
    model: Annotated[
        Path | None,
        model_option(
            "Directory of a checkpoint: load it, and say what it is served with.",
            show_default="none is loaded",
        ),
    ] = None,
    heads: HeadOptions,
    engine: EngineOptions,
    collectives: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Also start N processes, let their devices exchange data, and check what arrives: the first "
            "thing to know about a machine with several cards.",
            show_default="not checked",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print versions, devices and capture backends, and why something is not usable.

    With --model also what its engine makes of the options: device, dtype, kernels, limits, memory, buckets.
    The exit code is 0 if models can run on the CPU of this machine and --collectives found no fault, else 1.
    """
    findings = [*_versions(), *_with_torch()]
    if collectives is not None:
        with user_errors():
            findings.append(_collectives(engine.device, collectives))
    if model is not None:
        with user_errors():
            findings += _resolved(model, heads, engine)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    runs = any((f.topic, f.name, f.is_usable) == ("devices", "cpu", True) for f in findings)
    if not runs or any(f.topic == "collectives" and not f.is_usable for f in findings):
        raise typer.Exit(1)


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "hpu-duo", None, metadata.version("hpu-duo"))
    yield Finding("versions", "python", None, f"{platform.python_version()}, {platform.platform()}")
    for name in _NEEDED:
        version = _version(name)
        yield Finding("versions", name, version is not None, version or "not installed, but needed")
    for name in _OPTIONAL:
        yield Finding("versions", name, None, _version(name) or "not installed (optional)")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _with_torch() -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield Finding("devices", "cpu", False, "torch is not installed")
        return
    yield from _devices()
    yield from _cpu()
    yield from _graphs()


def _devices() -> Iterator[Finding]:
    from hpu_duo.device import NAMES, problem, resolve_device

    for name in NAMES:
        reason = problem(name)
        yield Finding("devices", name, reason is None, reason or "usable")
    yield Finding("devices", "auto", None, f"is {resolve_device('auto')} here")


def _cpu() -> Iterator[Finding]:
    import torch

    from hpu_duo.modeling.packed_linear import can_pack
    from kernels_ref import native
    from kernels_ref.x86 import library

    flags = library.cpu_flags()
    found = ", ".join(flag for flag in _CPU_FLAGS if flag in flags) or "none of " + ", ".join(_CPU_FLAGS)
    yield Finding("cpu", "threads", None, f"{torch.get_num_threads()} used by torch")
    yield Finding(
        "cpu", "instructions", None, f"torch uses {torch.backends.cpu.get_cpu_capability()}; {found}"
    )
    packs = can_pack(torch.bfloat16)
    kernel = "oneDNN"
    if library.is_supported():
        ours = library.description()
        kernel = ours if native.compiler() else f"oneDNN: {ours} need a C++ compiler, and none is on the path"
    detail = f"bfloat16 weights are laid out once for {kernel}" if packs else "oneDNN has no bfloat16 here"
    yield Finding("cpu", "packed weights", packs, detail)


def _graphs() -> Iterator[Finding]:
    import torch

    from graphs.backends import BACKEND_NAMES, make_backend
    from hpu_duo.device import problem

    for name in BACKEND_NAMES:
        device = {"cuda": "cuda", "hpu-compile": "hpu", "hpu-graph": "hpu"}.get(name, "cpu")
        reason = problem(device) or make_backend(name).problem(torch.device(device))
        yield Finding("graphs", name, reason is None, reason or f"usable on {device}")


def _collectives(device: str, num_processes: int) -> Finding:
    from hpu_duo.device import WorkerError
    from hpu_duo.device.collectives import check_collectives

    try:
        found = check_collectives(device, num_processes)
    except WorkerError as error:
        reason, _, trace = str(error).partition("\n")
        typer.echo(trace, err=True, nl=False)
        return Finding("collectives", device, False, reason)
    devices = ", ".join(dict.fromkeys(found.devices))
    detail = (
        f"{num_processes} processes on {devices}: all_reduce and broadcast are right; "
        f"{found.num_bytes >> 20} MiB summed in {found.seconds * 1e3:.1f} ms, "
        f"{found.bus_bandwidth / 1e9:.1f} GB/s on the bus"
    )
    return Finding("collectives", found.backend, True, detail)


def _resolved(model: Path, heads: HeadOptions, engine: EngineOptions) -> Iterator[Finding]:
    loaded = load_model(model, heads, engine, SchedulerConfig.max_num_seqs)
    stats = loaded.stats()
    for name, value in stats.resolved.items().items():
        shown = show_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
        yield Finding("model", name, None, shown)
    for note in stats.notes:
        yield Finding("model", "note", None, note)


def _show(findings: list[Finding]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column()
    table.add_column(overflow="fold")
    topic, console = "", Console()
    for finding in findings:
        sign = "" if finding.is_usable is None else mark(finding.is_usable, console)
        table.add_row("" if finding.topic == topic else finding.topic, finding.name, sign, finding.detail)
        topic = finding.topic
    console.print(table)
