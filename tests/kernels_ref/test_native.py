"""Sources are built once, and what cannot be built is done without."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch

import kernels_ref
from kernels_ref import native
from kernels_ref.native import BuildError, Sources, Unit, build
from kernels_ref.x86 import library, linear

pytestmark = pytest.mark.instruction_set

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it.


@pytest.fixture
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds go to a folder of the test; without a compiler it is skipped."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path / "built")


@pytest.mark.usefixtures("_own_folder")
def test_sources_are_built_once_and_a_failure_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seven, eight = tmp_path / "seven.cpp", tmp_path / "eight.cpp"
    seven.write_text(
        '#include "one.h"\nextern "C" int eight();\nextern "C" int seven() { return eight() - ONE; }\n'
    )
    eight.write_text('extern "C" int eight() { return 8; }\n')
    header = tmp_path / "one.h"
    header.write_text("#define ONE 1\n")
    first = build("numbers", [seven, eight])
    stamp = first.stat().st_mtime_ns
    assert build("numbers", [seven, eight]).stat().st_mtime_ns == stamp
    header.write_text("#define ONE 2\n")
    assert build("numbers", [seven, eight]) != first
    seven.write_text("not C++\n")
    with pytest.raises(BuildError, match="fails for numbers: "):
        build("numbers", [seven, eight])
    assert sorted(path.suffix for path in first.parent.iterdir()) == [".lock", ".so", ".so"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        build("numbers", [eight])


def build_seven(source: Path, begin: Barrier) -> None:
    """Build when all processes are there."""
    begin.wait(60)
    build("seven", [source])


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each call of the compiler."""
    calls, compiler = tmp_path / "calls", tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nsleep 0.2\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return calls


@pytest.mark.usefixtures("_own_folder")
def test_processes_that_need_the_same_library_compile_it_once(tmp_path: Path, calls: Path) -> None:
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }\n')
    context = get_context("fork")
    begin = context.Barrier(3)
    processes = [context.Process(target=build_seven, args=(source, begin)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    library = build("seven", [source])
    assert ctypes.CDLL(str(library)).seven() == 7
    assert len(calls.read_text().splitlines()) == 3, "one source, a name for torch, one library"


@pytest.mark.usefixtures("_own_folder")
def test_threads_that_need_the_same_library_compile_it_once(tmp_path: Path, calls: Path) -> None:
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }\n')
    with ThreadPoolExecutor(4) as threads:
        (library,) = {*threads.map(lambda _: build("seven", [source]), range(4))}
    assert ctypes.CDLL(str(library)).seven() == 7
    assert len(calls.read_text().splitlines()) == 3, "one source, a name for torch, one library"


def forget() -> None:
    """Load the operators anew."""
    library._load.cache_clear()
    library._is_prebuilt.cache_clear()
    library._load_operators.cache_clear()


@pytest.mark.usefixtures("_own_folder")
def test_a_source_may_be_compiled_several_times_with_options_of_its_own(tmp_path: Path) -> None:
    source, sum_ = tmp_path / "number.cpp", tmp_path / "sum.cpp"
    source.write_text('extern "C" int NAME() { return VALUE; }\n')
    sum_.write_text(
        'extern "C" int one(); extern "C" int two();\nextern "C" int sum() { return one() + two(); }\n'
    )
    units = [Unit(source, ("-DNAME=one", "-DVALUE=1")), Unit(source, ("-DNAME=two", "-DVALUE=2")), sum_]
    built = build("numbers", units)
    assert ctypes.CDLL(str(built)).sum() == 3
    assert build("numbers", [units[0], Unit(source, ("-DNAME=two", "-DVALUE=3")), sum_]) != built


@pytest.mark.skipif(not library.is_supported(), reason="needs a CPU with AVX512-BF16")
def test_without_a_compiler_there_are_no_operators_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path / "built")
    monkeypatch.setattr(native, "prebuilt_folder", lambda: tmp_path)
    forget()
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    try:
        with pytest.warns(UserWarning, match=r"slower than it could on this CPU: no C\+\+ compiler"):
            assert not linear.fits(weight)
        assert not linear.fits(weight)
        with pytest.raises(ValueError, match="expected a CPU and a compiler"):
            linear.multiply(weight[:1], linear.pack(weight), None, 64)
    finally:
        forget()


def test_every_source_and_header_is_installed_with_the_package() -> None:
    root = Path(kernels_ref.__file__).parents[1]
    with open(root / "pyproject.toml", "rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]
    for package in ("bias_builders", "graphs", "hpu_duo", "kernels_ref"):
        for path in (root / package).rglob("*"):
            if path.suffix in (".cpp", ".h"):
                patterns = data[".".join(path.parent.relative_to(root).parts)]
                assert any(path.match(pattern) for pattern in patterns), f"{path} is left out of the package"


def test_a_variable_switches_our_kernels_off_or_to_fewer_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = frozenset(("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"))
    monkeypatch.setattr(library, "cpu_flags", lambda: flags)
    found = {}
    for value in ("0", "avx2", "avx512", "1"):
        monkeypatch.setenv(library.SWITCH, value)
        found[value] = library.lanes()
        assert library.serves(torch.float16, torch.float32) == (value != "0")
        assert value == "1" or not library.is_supported()
    assert found == {"0": (), "avx2": (8,), "avx512": (8, 16), "1": (8, 16)}
    monkeypatch.setattr(library, "cpu_flags", lambda: flags - {"f16c"})
    assert not library.serves(torch.bfloat16, torch.float32)
    assert not library.serves(torch.float16, torch.float16)
    monkeypatch.setenv(library.SWITCH, "off")
    with pytest.raises(ValueError, match="HPU_DUO_X86_KERNELS: expected 0, 1, avx2 or avx512, got 'off'"):
        library.is_supported()


@pytest.mark.usefixtures("_own_folder")
def test_a_prebuilt_library_of_the_same_sources_comes_before_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seven = tmp_path / "seven.cpp"
    seven.write_text('extern "C" int seven() { return VALUE; }\n')
    mine, all_machines = (Unit(seven, ("-msse2", f"-DVALUE={value}")) for value in (6, 7))
    sources = Sources("seven", (mine,), (all_machines,))
    monkeypatch.setattr(native, "prebuilt_folder", lambda: tmp_path / "prebuilt")
    assert sources.origin() == "built"
    prebuilt = sources.prebuild(native.prebuilt_folder())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sources.provide() == (prebuilt, "prebuilt")
    assert ctypes.CDLL(str(prebuilt)).seven() == 7
    assert Sources("seven", (mine,)).origin() is None, "other machines"
    seven.write_text('extern "C" int seven() { return 1 + VALUE; }\n')
    assert sources.origin() is None, "other sources"


def test_the_prebuilt_library_is_not_for_cpus_that_lack_some_of_its_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = frozenset(("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"))
    monkeypatch.setenv(library.SWITCH, "1")
    for more, has_pairs, fits in (((), False, True), ((), True, False), (("avx512vbmi",), True, True)):
        monkeypatch.setattr(library, "cpu_flags", lambda more=more: flags.union(more))
        monkeypatch.setattr(library, "is_supported", lambda has_pairs=has_pairs: has_pairs)
        assert bool(library.sources().portable) == fits
    monkeypatch.setattr(library, "cpu_flags", frozenset)
    monkeypatch.setattr(library, "is_supported", lambda: False)
    assert not library.sources().portable


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_wheel_with_prebuilt_kernels_serves_without_a_compiler(tmp_path: Path) -> None:
    if shutil.which("g++") is None or not library.lanes():
        pytest.skip("needs g++, and a CPU with AVX2")
    root = Path(kernels_ref.__file__).parents[1]
    for name in ("bias_builders", "kernels_ref"):
        ignored = shutil.ignore_patterns("prebuilt", "__pycache__")
        shutil.copytree(root / name, tmp_path / name, ignore=ignored)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch, kernels_ref.native as native\n"
        "from dataclasses import replace\n"
        "from kernels_ref import rowwise\n"
        "from kernels_ref.x86 import library\n"
        "library.OPTIONS = '-O1', '-fopenmp'\n"  # compiled in three quarters of the time
        "for module in (library, rowwise):\n"
        "    replace(module.sources(), portable=module.portable_units()).prebuild(native.prebuilt_folder())\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    check = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch\n"
        "from kernels_ref import rowwise\n"
        "from kernels_ref.x86 import library, linear\n"
        "library.OPTIONS = '-O1', '-fopenmp'\n"
        "assert rowwise.is_available() and library.is_available(torch.float32)\n"
        "assert library.origin() == rowwise.sources().origin() == 'prebuilt'\n"
        "x, w = torch.randn(3, 64), torch.randn(32, 64)\n"
        "for name in library.variants(torch.float32):\n"
        "    torch.testing.assert_close(linear.multiply(x, linear.pack(w), None, 32, None, name), x @ w.T)\n"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    for switch in ("avx2", "avx512", "1"):
        environment = {**os.environ, "PATH": str(empty), "HOME": str(empty), library.SWITCH: switch}
        subprocess.run([sys.executable, "-c", check, str(tmp_path)], env=environment, check=True)
