"""Tools that ``torch.compile`` needs besides torch to build code for the CPU."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

_COMPILERS = ("g++", "clang++", "c++")


def cpu_compile_problem() -> str | None:
    """Why ``torch.compile`` cannot build CPU code on this machine, or None when it can."""
    if not any(map(shutil.which, _COMPILERS)):
        return f"no C++ compiler is on the path ({', '.join(_COMPILERS)})"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"the headers of Python {sys.version_info.major}.{sys.version_info.minor} are not installed"
    return None
