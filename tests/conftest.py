"""Shared by all tests: Triton's interpreter where there is no GPU, and the mark of tests that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from hpu_duo.garbage import collector_paused, leave_out_what_is_there

HAS_GPU = torch.cuda.is_available()

# The time that an example takes says more of the load of a machine than of the code. The suite tries the same
# examples in every run, so that a change is judged by what it changed; `--hypothesis-profile search` looks
# for new ones.
settings.register_profile("hpu-duo", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile("hpu-duo")

if not HAS_GPU:
    # Triton reads this when it is imported, which any test may cause. This file is run before all of them,
    # in every worker.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave modules and collected tests, which stay, out of the garbage collections of all tests.

    They are a million objects, and a collection that visits them takes about a second.
    """
    with collector_paused():
        yield
    leave_out_what_is_there()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
