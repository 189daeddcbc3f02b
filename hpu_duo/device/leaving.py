"""The end of a process that holds a model."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int, *, calls_exit_functions: bool = True) -> NoReturn:
    """End this process now, without tearing the interpreter down.

    With a model that takes seconds, in which nothing is done for anybody.

    Args:
        code: exit code.
        calls_exit_functions: whether what is registered with ``atexit`` is called.
    """
    if calls_exit_functions:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
