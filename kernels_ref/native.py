"""Build C++ sources against torch's headers, once per machine and torch version."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import BoundedSemaphore, Lock
from typing import NamedTuple

import torch
from tqdm import tqdm

COMPILERS = ("g++", "clang++", "c++")
_SHOWN_CHARACTERS = 2000
_compilers = BoundedSemaphore(os.cpu_count() or 1)
_locks: dict[Path, Lock] = {}
_locks_lock = Lock()


class BuildError(RuntimeError):
    """Sources could not be built; the message has the reason."""


class Unit(NamedTuple):
    """A source to compile, and options for the compiler beside those of its library."""

    source: Path
    options: tuple[str, ...] = ()


def compiler() -> str | None:
    """The C++ compiler that would be used, or None when there is none on the path."""
    return next((found for found in map(shutil.which, COMPILERS) if found), None)


def build(name: str, sources: Sequence[Path | Unit], options: Sequence[str] = ()) -> Path:
    """The shared library of some sources, in torch's folder for extensions; they are compiled side by side.

    A source may be there several times, with different options. The library is built again when a source, a
    header beside one, an option, the compiler's path or torch changes.
    Threads that build the same library wait for the first of them, and at most as many compilers run at a
    time as the machine has cores.

    Args:
        name: what the file's name begins with.
        options: for the compiler, beside those that torch's headers need.

    Raises:
        BuildError: there is no compiler, it fails, or the folder cannot be written.
    """
    try:
        from torch.utils import cpp_extension
    except ImportError as error:  # it needs setuptools
        raise BuildError(f"torch's tools for extensions cannot be imported: {error}") from error
    program = compiler()
    if program is None:
        raise BuildError(f"no C++ compiler is on the path ({', '.join(COMPILERS)})")
    abi = int(torch.compiled_with_cxx11_abi())
    command = [program, "-fPIC", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *options]
    units = [source if isinstance(source, Unit) else Unit(source) for source in sources]
    headers = {path for unit in units for path in unit.source.parent.glob("*.h")}
    added = [unit.options for unit in units if unit.options]
    key = hashlib.sha256(repr((torch.__version__, command, *added)).encode())
    for path in (*(unit.source for unit in units), *sorted(headers)):
        key.update(path.read_bytes())
    folder = Path(cpp_extension.get_default_build_root()) / "hpu_duo"
    library = folder / f"{name}-{key.hexdigest()[:16]}.so"
    with _locks_lock:
        lock = _locks.setdefault(library, Lock())
    with lock:
        if not library.is_file():
            _compile(library, name, units, command)
    return library


def _compile(library: Path, name: str, units: Sequence[Unit], command: Sequence[str]) -> None:
    from torch.utils import cpp_extension

    headers_of_torch = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    libraries = ["-lc10", "-ltorch_cpu"]
    for directory in cpp_extension.library_paths():
        libraries += [f"-L{directory}", f"-Wl,-rpath,{directory}"]

    def run(arguments: Sequence[str]) -> None:
        with _compilers:
            done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{command[0]} fails for {name}: {done.stderr[-_SHOWN_CHARACTERS:]}")

    folder = library.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Other processes may build it too: each does so in a folder of its own, and moves the result.
        with TemporaryDirectory(prefix=f".{name}-", dir=folder) as own:
            objects = [str(Path(own) / f"{number}.o") for number in range(len(units))]
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                compiling = [
                    threads.submit(
                        run, [*unit.options, "-c", str(unit.source), "-o", output, *headers_of_torch]
                    )
                    for unit, output in zip(units, objects, strict=True)
                ]
                bar = tqdm(
                    as_completed(compiling),
                    desc=f"building C++ of {name}, once",
                    total=len(compiling),
                    unit="file",
                    leave=False,
                )
                for each in bar:
                    each.result()
            built = Path(own) / library.name
            run(["-shared", *objects, "-o", str(built), *libraries])
            built.replace(library)
    except OSError as error:
        raise BuildError(f"{name} cannot be built in {folder}: {error}") from error
