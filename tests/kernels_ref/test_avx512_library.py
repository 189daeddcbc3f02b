"""Sources are built once, and what cannot be built is done without."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernels_ref.avx512.library import BuildError, build, is_supported, load


def test_a_source_is_built_once_and_a_failure_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }\n')
    library = build(source, [])
    stamp = library.stat().st_mtime_ns
    assert build(source, []).stat().st_mtime_ns == stamp
    source.write_text("not C++\n")
    with pytest.raises(BuildError, match=r"refuses seven\.cpp"):
        build(source, [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        build(source, [])


@pytest.mark.skipif(not is_supported(), reason="needs a CPU with AVX512-BF16 and without AMX")
def test_without_a_compiler_there_is_no_library_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    load.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"slower than it could on this CPU: no C\+\+ compiler"):
            assert load("attention") is None
        assert load("attention") is None
    finally:
        load.cache_clear()
