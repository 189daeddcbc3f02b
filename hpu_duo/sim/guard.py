"""Build and load the device guard that lets stock torch handle tensors of device type ``hpu``."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch

COMPILERS = ("g++", "clang++", "c++")
_SOURCE = Path(__file__).with_name("guard.cpp")
_SHOWN_CHARACTERS = 2000


def compiler() -> str | None:
    """The C++ compiler that would be used, or None when there is none on the path."""
    return next((found for found in map(shutil.which, COMPILERS) if found), None)


@cache
def load_guard() -> Path:
    """Compile the guard, once per torch version and machine, and load it into this process.

    Returns:
        The shared library, in torch's folder for extensions built at run time.

    Raises:
        ValueError: there is no C++ compiler, or it does not accept torch's headers.
    """
    from torch.utils import cpp_extension

    # The headers' C++ standard and ABI follow the torch version, which hence belongs to the name.
    key = hashlib.sha256(f"{torch.__version__}{torch._C._GLIBCXX_USE_CXX11_ABI}".encode())
    key.update(_SOURCE.read_bytes())
    folder = Path(cpp_extension.get_default_build_root()) / "hpu_duo_sim"
    library = folder / f"guard-{key.hexdigest()[:16]}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(library, cpp_extension.include_paths(), cpp_extension.library_paths())
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    return library


def _compile(library: Path, includes: list[str], libraries: list[str]) -> None:
    program = compiler()
    if program is None:
        raise ValueError(f"the simulated HPU needs a C++ compiler, found none of {', '.join(COMPILERS)}")
    # Several processes may build at the same time: each writes a file of its own and renames it.
    unfinished = library.with_suffix(f".{os.getpid()}.so")
    options = ["-shared", "-fPIC", "-std=c++20", "-O0", f"-D_GLIBCXX_USE_CXX11_ABI={_abi()}"]
    paths = [
        *(f"-I{path}" for path in includes),
        *(option for path in libraries for option in (f"-L{path}", f"-Wl,-rpath,{path}")),
    ]
    done = subprocess.run(
        [program, *options, str(_SOURCE), "-o", str(unfinished), *paths, "-lc10"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"{program} cannot build the simulated HPU: {done.stderr[-_SHOWN_CHARACTERS:]}")
    unfinished.replace(library)


def _abi() -> int:
    return int(torch._C._GLIBCXX_USE_CXX11_ABI)
