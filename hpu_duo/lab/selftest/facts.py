"""Versions, devices and capture backends of this machine, and why something is not usable."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from hpu_duo.version import __version__

_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
_OPTIONAL = ("optimum-habana", "habana-torch-plugin", "triton")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")

_AUTO = "from 4 % behind to 4 times as fast as 'compile', measured at 1, 32 and 512 rows"
"""Of a Llama of 110M with four kinds of kernels: the table in ``docs/capture.md``."""


@dataclass(frozen=True)
class Fact:
    """One line about the machine or a model on it.

    Attributes:
        topic: versions, devices, cpu, graphs, collectives or model.
        is_usable: whether the subject works; None for a plain fact.
    """

    topic: str
    name: str
    is_usable: bool | None
    detail: str


def machine_facts() -> Iterator[Fact]:
    """Everything about the machine that is known without a model; torch need not be installed."""
    yield from _versions()
    yield from _with_torch()


def _versions() -> Iterator[Fact]:
    yield Fact("versions", "hpu-duo", None, __version__)
    yield Fact("versions", "python", None, f"{platform.python_version()}, {platform.platform()}")
    for name in _NEEDED:
        version = _version(name)
        yield Fact("versions", name, version is not None, version or "not installed, but needed")
    for name in _OPTIONAL:
        yield Fact("versions", name, None, _version(name) or "not installed (optional)")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _with_torch() -> Iterator[Fact]:
    if find_spec("torch") is None:
        yield Fact("devices", "cpu", False, "torch is not installed")
        return
    yield from _devices()
    yield from _cpu()
    yield from _graphs()


def _devices() -> Iterator[Fact]:
    from hpu_duo.device import NAMES, problem, resolve_device

    for name in NAMES:
        reason = problem(name)
        yield Fact("devices", name, reason is None, reason or "usable")
    yield Fact("devices", "auto", None, f"is {resolve_device('auto')} here")


def _cpu() -> Iterator[Fact]:
    import torch

    from kernels_ref.x86 import library

    flags = library.cpu_flags()
    found = ", ".join(flag for flag in _CPU_FLAGS if flag in flags) or "none of " + ", ".join(_CPU_FLAGS)
    yield Fact("cpu", "threads", None, f"{torch.get_num_threads()} used by torch")
    yield Fact("cpu", "instructions", None, f"torch uses {torch.backends.cpu.get_cpu_capability()}; {found}")
    try:
        yield _packed()
    except ValueError as error:  # a variable of the environment
        yield Fact("cpu", "packed weights", False, str(error))


_ORIGINS = {"prebuilt": "", "cached": ", which are built", "built": ", which will be built at first use"}
"""Remarks of ``doctor`` on kernels by their origin; that of prebuilt ones is in their description."""


def _packed() -> Fact:
    """The code that packs the weights of 16-bit checkpoints, and what this machine lacks for better code."""
    import torch

    from hpu_duo.modeling.packed_linear import can_pack
    from kernels_ref.x86 import library

    dtypes, ours = "bfloat16", library.description() if library.is_supported() else None
    if ours is None and library.lanes():
        dtypes, ours = "bfloat16 and float16", library.description(torch.float32)
    origin = None if ours is None else library.origin()
    if origin is not None:
        detail = f"{dtypes} weights are laid out once for {ours}{_ORIGINS[origin]}"
        return Fact("cpu", "packed weights", True, detail)
    packs = can_pack(torch.bfloat16)
    detail = "bfloat16 weights are laid out once for oneDNN" if packs else "oneDNN has no bfloat16 here"
    if ours is not None:
        detail += f": {ours} need a C++ compiler or a wheel that has them built, and there is neither; "
        detail += library.LOSS
    elif library.switch() == "0":
        detail += f": {library.SWITCH}=0 switches our kernels off, and {library.LOSS}"
    return Fact("cpu", "packed weights", packs, detail)


def _graphs() -> Iterator[Fact]:
    import torch

    from graphs.backends import BACKEND_NAMES, make_backend
    from hpu_duo.device import problem

    for name in BACKEND_NAMES:
        device = {"cuda": "cuda", "hpu-compile": "hpu", "hpu-graph": "hpu"}.get(name, "cpu")
        reason = problem(device) or make_backend(name).problem(torch.device(device))
        detail = f"usable on {device}"
        if name == "replay":
            detail += f"; graphs='auto' there: {_AUTO}"
        yield Fact("graphs", name, reason is None, reason or detail)
