"""Build the C++ sources of this package at their first use, once per machine, and load them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch.utils.cpp_extension import get_default_build_root

COMPILERS = ("g++", "clang++", "c++")
_INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16")
_OPTIONS = ("-std=c++17", "-O3", "-fopenmp", *(f"-m{name}" for name in _INSTRUCTIONS))
_SHOWN_CHARACTERS = 2000


def is_supported() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 in vectors, and has nothing better.

    With AMX, torch's own kernels use its tiles, which are several times faster than vectors.
    """
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


@cache
def load(name: str) -> ctypes.CDLL | None:
    """The library of the source ``name``.cpp; None, with one warning, where it cannot be built.

    None without a warning where the CPU is another one.
    """
    if not is_supported():
        return None
    try:
        return ctypes.CDLL(str(build(Path(__file__).with_name(f"{name}.cpp"), _OPTIONS)))
    except (BuildError, OSError) as error:
        warnings.warn(f"bfloat16 runs slower than it could on this CPU: {error}", stacklevel=2)
        return None


class BuildError(RuntimeError):
    """A source could not be built here; says why."""


def build(source: Path, options: Sequence[str]) -> Path:
    """The shared library of a source, in torch's folder for extensions built at run time.

    It is built again when the source, headers beside it, the options or the compiler's path change.

    Raises:
        BuildError: there is no compiler, it refuses the source, or the folder cannot be written.
    """
    program = next((found for found in map(shutil.which, COMPILERS) if found), None)
    if program is None:
        raise BuildError(f"no C++ compiler is on the path ({', '.join(COMPILERS)})")
    headers = [path.read_bytes() for path in sorted(source.parent.glob("*.h"))]
    content = b"".join([source.read_bytes(), *headers, repr((program, *options)).encode()])
    key = hashlib.sha256(content).hexdigest()
    folder = Path(get_default_build_root()) / "hpu_duo_kernels"
    library = folder / f"{source.stem}-{key[:16]}.so"
    if library.is_file():
        return library
    # Several processes may build at the same time: each writes a file of its own and renames it.
    unfinished = library.with_suffix(f".{os.getpid()}.so")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [program, "-shared", "-fPIC", *options, str(source), "-o", str(unfinished)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise BuildError(f"{program} refuses {source.name}: {done.stderr[-_SHOWN_CHARACTERS:]}")
        unfinished.replace(library)
    except OSError as error:
        raise BuildError(f"{source.name} cannot be built in {folder}: {error}") from error
    return library
