"""The interpreter of fused elementwise programs: ``torch.ops.hpu_duo_rowwise``, built at first use."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from threading import Lock

import torch

from kernels_ref.native import BuildError, build
from kernels_ref.x86.library import is_supported

_lock = Lock()
_VECTORS = {
    "AVX512": (
        "-mavx512f",
        "-mavx512dq",
        "-mavx512vl",
        "-mavx512bw",
        "-mfma",
        "-mprefer-vector-width=512",
        "-DCPU_CAPABILITY_AVX512",
    ),
    "AVX2": ("-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX2"),
}


def is_available() -> bool:
    """Whether the operators are available. False, with one warning, where they cannot be built."""
    with _lock:
        return _load()


@cache
def _load() -> bool:
    capability = torch.backends.cpu.get_cpu_capability()
    vectors = _VECTORS.get(capability, ())
    if capability == "AVX512" and is_supported():
        vectors = (*vectors, "-mavx512bf16")
    source = Path(__file__).parent / "rowwise.cpp"
    try:
        torch.ops.load_library(build("rowwise", [source], ("-O3", "-fopenmp", *vectors)))
    except (BuildError, OSError) as error:
        warnings.warn(f"small operators of a step run one by one: {error}", stacklevel=2)
        return False
    return True
