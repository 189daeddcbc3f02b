"""C++ libraries: found prebuilt in the package or in a cache, or built once per machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import BoundedSemaphore, Lock
from typing import Literal, NamedTuple

import torch
from torch import _appdirs
from tqdm import tqdm

COMPILERS = ("g++", "clang++", "c++")

Origin = Literal["prebuilt", "cached", "built"]
"""Origin of a library: the installed package, an earlier build in ``cache_folder``, or a build now."""

_PLAIN = ("-fPIC", "-std=c++20")
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


def prebuilt_folder() -> Path:
    """Folder of the libraries that a platform wheel has."""
    return Path(__file__).parent / "prebuilt"


def cache_folder() -> Path:
    """Folder of built libraries, in torch's folder for extensions."""
    return Path(_appdirs.user_cache_dir("torch_extensions")).resolve() / "hpu_duo"


@dataclass(frozen=True)
class Sources:
    """Sources of a library, compiled side by side. One may be there several times, with other options.

    The library is loaded into a process with torch, whose C functions, threads and mathematical functions it
    may call.

    Attributes:
        name: what the names of its files begin with.
        units: what is built for this machine.
        portable: what a prebuilt library is made of; empty where this machine cannot run all that it needs.
        options: for the compiler.
        needs_torch: sources include torch's headers.
    """

    name: str
    units: tuple[Unit, ...]
    portable: tuple[Unit, ...] = ()
    options: tuple[str, ...] = ()
    needs_torch: bool = False

    def origin(self) -> Origin | None:
        """Return the origin of what ``provide`` returns; None if it would fail for lack of a compiler."""
        return self._present()[1] or ("built" if compiler() else None)

    def provide(self) -> tuple[Path, Origin]:
        """Find the library, or build it.

        A prebuilt library is used if it is of the same sources and options, and so is one that was built
        before, with ``needs_torch`` for the same torch. Threads and processes that need the same library wait
        for the first of them, and a process runs at most as many compilers as the machine has cores.

        Raises:
            BuildError: there is no compiler, it fails, or the folder cannot be written.
        """
        path, origin = self._present()
        if origin:
            return path, origin
        with _locks_lock:
            lock = _locks.setdefault(path, Lock())
        with lock, self._locked(path.parent):
            if not path.is_file():
                self._build(path, self.units)
        return path, "built"

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """Let no other process build libraries of this name meanwhile, on file systems with locks."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f".{self.name}.lock").open("w") as file:
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise self._unbuilt(folder, error) from error

    def prebuild(self, folder: Path) -> Path:
        """Build the portable library.

        Objects of the same options are merged, and templates and inline functions hidden in them: otherwise
        one copy of a template of the standard library, compiled for instructions that another machine lacks,
        would serve all objects.

        Raises:
            BuildError: see ``provide``.
        """
        return self._build(folder / self._file(self.portable), self.portable, is_portable=True)

    def _present(self) -> tuple[Path, Origin | None]:
        if self.portable:
            prebuilt = prebuilt_folder() / self._file(self.portable)
            if prebuilt.is_file():
                return prebuilt, "prebuilt"
        cached = cache_folder() / self._file(self.units, torch.__version__ if self.needs_torch else "")
        return cached, "cached" if cached.is_file() else None

    def _file(self, units: Sequence[Unit], version: str = "") -> str:
        """The name of a file that says what is in it."""
        own = [(unit.source.name, unit.options) for unit in units]
        key = hashlib.sha256(repr((version, _PLAIN, self.options, own)).encode())
        headers = {path for unit in units for path in unit.source.parent.glob("*.h")}
        headers |= {*Path(__file__).parent.glob("*.h")}
        for path in (*dict.fromkeys(unit.source for unit in units), *sorted(headers)):
            key.update(path.read_bytes())
        return f"{self.name}-{key.hexdigest()[:16]}.so"

    def _build(self, library: Path, units: Sequence[Unit], *, is_portable: bool = False) -> Path:
        program = compiler()
        if program is None:
            raise BuildError(f"no C++ compiler is on the path ({', '.join(COMPILERS)})")
        folder = library.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Where files cannot be locked, processes may build it at once: each in a folder of its own.
            with TemporaryDirectory(prefix=f".{self.name}-", dir=folder) as own:
                build = _Build(self, program, Path(own))
                objects = build.compile(units)
                built = Path(own) / library.name
                build.link(build.apart(units, objects) if is_portable else objects, built, is_portable)
                built.replace(library)
        except OSError as error:
            raise self._unbuilt(folder, error) from error
        return library

    def _unbuilt(self, folder: Path, error: OSError) -> BuildError:
        return BuildError(f"{self.name} cannot be built in {folder}: {error}")


class _Build(NamedTuple):
    """A build of some sources in a folder of its own."""

    sources: Sources
    program: str
    folder: Path

    def compile(self, units: Sequence[Unit]) -> list[Path]:
        """Return an object of each unit."""
        torch_folder = Path(torch.__file__).parent / "include"
        headers = [torch_folder, torch_folder / "torch/csrc/api/include"] if self.sources.needs_torch else []
        shared = [*_PLAIN, *self.sources.options, *(f"-isystem{path}" for path in headers)]
        if self.sources.needs_torch:
            shared.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
        objects = [self.folder / f"{number}.o" for number in range(len(units))]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            compiling = [
                threads.submit(self._run, *shared, *unit.options, "-c", str(unit.source), "-o", str(output))
                for unit, output in zip(units, objects, strict=True)
            ]
            bar = tqdm(
                as_completed(compiling),
                desc=f"building C++ of {self.sources.name}, once",
                total=len(compiling),
                unit="file",
                leave=False,
            )
            for each in bar:
                each.result()
        return objects

    def apart(self, units: Sequence[Unit], objects: Sequence[Path]) -> list[Path]:
        """Return an object for all units with the same options, which has templates of its own."""
        groups: dict[tuple[str, ...], list[Path]] = {}
        for unit, output in zip(units, objects, strict=True):
            groups.setdefault(unit.options, []).append(output)
        plain = groups.pop((), [])
        merged = [self.folder / f"group{number}.o" for number in range(len(groups))]
        for output, group in zip(merged, groups.values(), strict=True):
            self._run("-r", "-nostdlib", "-Wl,--force-group-allocation", "-o", str(output), *map(str, group))
            kept = output.with_suffix(".names")
            names = self._run("--defined-only", "--extern-only", "--format=posix", str(output), program="nm")
            # Of templates and inline functions (W, V, u) each group keeps its own copy.
            lines = (line.split() for line in names.splitlines())
            kept.write_text("".join(f"{name}\n" for name, kind, *_ in lines if kind in "TRDB"))
            self._run(f"--keep-global-symbols={kept}", str(output), program="objcopy")
        return [*plain, *merged]

    def link(self, objects: Sequence[Path], library: Path, is_portable: bool) -> None:
        """Link a library. What it does not define, it finds in torch's library and in its libraries."""
        # A library of that name is in each process with torch; this one has nothing but the name.
        stub = self.folder / "libtorch_cpu.so"
        self._run("-shared", "-nostdlib", f"-Wl,-soname,{stub.name}", "-xc++", os.devnull, "-o", str(stub))
        options = ["-Wl,--no-as-needed", f"-L{self.folder}", "-ltorch_cpu", "-Wl,--as-needed"]
        if self.sources.needs_torch and not is_portable:
            folder = Path(torch.__file__).parent / "lib"
            options += [f"-L{folder}", "-lc10", f"-Wl,-rpath,{folder}"]
        if "-fopenmp" in self.sources.options and "clang" in Path(self.program).resolve().name:
            options.append("-fopenmp")  # its threads are not those of torch
        self._run("-shared", "-Wl,-s", *map(str, objects), "-o", str(library), *options)

    def _run(self, *arguments: str, program: str | None = None) -> str:
        program = program or self.program
        with _compilers:
            done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{program} fails for {self.sources.name}: {done.stderr[-_SHOWN_CHARACTERS:]}")
        return done.stdout


def build(
    name: str, sources: Sequence[Path | Unit], options: Sequence[str] = (), *, needs_torch: bool = False
) -> Path:
    """The shared library of some sources, found or built; see ``Sources``, which has the arguments.

    Raises:
        BuildError: see ``Sources.provide``.
    """
    units = tuple(source if isinstance(source, Unit) else Unit(source) for source in sources)
    return Sources(name, units, options=tuple(options), needs_torch=needs_torch).provide()[0]
