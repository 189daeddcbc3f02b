"""Shared by all tests: marks, checkpoints that many load, the simulated HPU, ranks that start quickly."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from typer.main import get_command

from hpu_duo.garbage import collector_paused, leave_out_what_is_there
from tests.forked import start_forked
from tests.tiers import may_have_slow_tests

if TYPE_CHECKING:
    from hpu_duo.lab import sim
    from tests.engine.tiny import Tiny
    from tests.modeling.families import Zoo

HAS_GPU = torch.cuda.is_available()

# The time that an example takes says more of the load of a machine than of the code. The suite tries the same
# examples in every run, so that a change is judged by what it changed; `--hypothesis-profile search` looks
# for new ones.
settings.register_profile("hpu-duo", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile("hpu-duo")
if hasattr(providers, "_get_local_constants"):
    # Examples would hold constants of all modules that a worker has imported by then, and so differ from run
    # to run. To parse those modules takes a worker fifteen seconds, besides.
    _parsed = providers._get_local_constants
    providers._get_local_constants = lambda: (
        providers._local_constants if settings.default.derandomize else _parsed()
    )

with suppress(ImportError, AttributeError):
    # Each client would parse the certificates of all authorities, which takes 50 ms of a CPU.
    from httpx._transports import default as http_transports

    http_transports.create_ssl_context = cache(http_transports.create_ssl_context)

if not HAS_GPU:
    # Triton reads this when it is imported, which any test may cause. This file is run before all of them,
    # in every worker.
    os.environ["TRITON_INTERPRET"] = "1"


torch.set_num_threads(1)
# Tests make many objects and few cycles.
gc.set_threshold(20_000, 20, 10)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave modules and collected tests, which stay, out of the garbage collections of all tests.

    They are a million objects, and a collection that visits them takes about a second.
    """
    with collector_paused():
        yield
    leave_out_what_is_there()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Leave out what the tests of a file leave behind, too: modules of transformers, code of Dynamo, graphs.

    A worker has millions of objects in the end, and a test that begins with a collection would take half a
    minute.
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        leave_out_what_is_there()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without slow tests out of runs of slow tests: each worker imports what it collects."""
    is_test = collection_path.match("test_*.py")
    if is_test and config.option.markexpr.startswith("slow") and not may_have_slow_tests(collection_path):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with long tests, skip what lacks a GPU, refuse slow tests that their tier would not find."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    if lost := [str(path) for path in slow if not may_have_slow_tests(path)]:
        raise pytest.UsageError(f"expected files with slow tests to name pytest.mark.slow, got {lost}")
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """Build the options of all commands once, not for each call of a test: 0.1 s of a CPU less for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", cache(get_command))
        yield


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Fork the processes that a module's tests start, instead of spawning them: 3 s of a CPU less for each.

    For tests of what ranks compute, not of how processes start, fail or end: a forked process reads its
    environment after its imports, and its parent is the fork server.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.multiprocessing.start_processes", start_forked)
        yield


@pytest.fixture
def default_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the default bucket table instead of a planned one of equal size.

    For tests of what engines compute with any buckets: each plan takes seconds.
    """
    from hpu_duo.startup import tables

    monkeypatch.setattr(tables, "planned_table", tables.default_table)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny random Llama with a tokenizer."""
    from tests.engine.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Tiny random checkpoints of many families."""
    from tests.modeling.families import Zoo

    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def simulated_hpu() -> sim.SimulatedHpu:
    """The simulated HPU; tests that need it are skipped where there is none."""
    from hpu_duo.lab import sim

    reason = sim.problem()
    if reason is not None:
        pytest.skip(f"no simulated HPU here: {reason}")
    return sim.install()
