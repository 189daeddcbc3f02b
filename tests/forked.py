"""Processes forked from one that has imported torch, transformers and the engine already."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

IMPORTED = ("tests.ranks.work", "torch._dynamo", "transformers.loss.loss_utils")
"""Modules that a rank needs, which take 3 s of a CPU to import."""

_start = mp.start_processes


def start_forked(work: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Any:
    """Start processes like ``torch.multiprocessing.start_processes``, but from the fork server.

    The server has the environment of its own start, so each process first takes that of this one.
    """
    multiprocessing.set_forkserver_preload(list(IMPORTED))
    options["start_method"] = "forkserver"
    return _start(_in_environment, (dict(os.environ), work, args), **options)


def _in_environment(number: int, environment: dict[str, str], work: Callable[..., Any], args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    work(number, *args)
