"""Build and load the device guard that lets stock torch handle tensors of device type ``hpu``."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from kernels_ref.native import BuildError, build


@cache
def load_guard() -> Path:
    """Compile the guard, once per torch version and machine, and load it into this process.

    Returns:
        The shared library.

    Raises:
        ValueError: there is no C++ compiler, or it does not accept torch's headers.
    """
    try:
        library = build("sim_guard", [Path(__file__).with_name("guard.cpp")], needs_torch=True)
    except BuildError as error:
        raise ValueError(f"the simulated HPU needs its guard: {error}") from error
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    return library
