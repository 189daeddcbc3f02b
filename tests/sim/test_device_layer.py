"""The device layer over a stand-in of the vendor's package, which keys and overwrites as documented."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpu_duo.device import (
    NAMES,
    CpuRuntime,
    hpu_problem,
    problem,
    process_environments,
    resolve_device,
    runtime_for,
)
from hpu_duo.device.habana import DeviceMemory, HabanaRuntime
from hpu_duo.device.habana_environment import prepare_environment
from hpu_duo.device.streams import CopiesStaged
from hpu_duo.engine.on_host.captured import QueuesCopies
from hpu_duo.lab import sim
from tests.tiers import every
from tests.vendor import STANDIN, VARIABLES, calls, importable


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


def test_without_the_vendors_package_hpu_says_so() -> None:
    assert hpu_problem() == "the package habana_frameworks is not installed"
    with pytest.raises(ValueError, match="'hpu' is not available: the package habana_frameworks is not"):
        resolve_device("hpu")


def test_every_name_is_usable_or_says_why_not() -> None:
    assert NAMES == ("cpu", "cuda", "hpu", "hpu-sim")
    for name in NAMES:
        reason = problem(name)
        if reason is not None:
            with pytest.raises(ValueError, match=re.escape(reason)):
                resolve_device(name)
    with pytest.raises(
        ValueError, match="expected device 'auto' or one of cpu, cuda, hpu, hpu-sim, got 'tpu'"
    ):
        resolve_device("tpu")
    assert isinstance(runtime_for(resolve_device("cpu")), CpuRuntime)


@pytest.mark.usefixtures("vendor")
def test_with_the_vendors_package_hpu_is_found_and_goes_first() -> None:
    assert hpu_problem() is None
    assert resolve_device("auto") == torch.device("hpu")
    assert resolve_device("hpu:0") == torch.device("hpu", 0)


@pytest.mark.usefixtures("vendor")
@pytest.mark.parametrize("lazy", [False, True])
def test_the_environment_is_set_before_the_first_import(lazy: bool) -> None:
    runtime = HabanaRuntime(lazy)
    assert runtime.is_lazy is lazy
    assert os.environ["PT_HPU_LAZY_MODE"] == str(int(lazy))
    assert os.environ["PT_HPU_WEIGHT_SHARING"] == "0"
    assert os.environ.get("PT_HPU_ENABLE_LAZY_COLLECTIVES") == ("true" if lazy else None)


@pytest.mark.usefixtures("vendor")
def test_eager_mode_is_asked_for_by_name_and_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare_environment()["PT_HPU_LAZY_MODE"] == "0"
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    monkeypatch.setenv("PT_HPU_WEIGHT_SHARING", "1")
    monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", ",false,1024")
    assert prepare_environment() == {
        "PT_HPU_LAZY_MODE": "1",
        "PT_HPU_RECIPE_CACHE_CONFIG": ",false,1024",
        "PT_HPU_WEIGHT_SHARING": "1",
        "PT_HPU_ENABLE_LAZY_COLLECTIVES": "true",
    }
    with pytest.raises(ValueError, match=r"expected PT_HPU_LAZY_MODE=0 .*, got PT_HPU_LAZY_MODE=1"):
        prepare_environment(lazy=False)


@pytest.mark.usefixtures("vendor")
@pytest.mark.parametrize("lazy", [False, True])
def test_the_mode_that_a_backend_needs_is_set_before_a_device_is_looked_for(lazy: bool) -> None:
    assert resolve_device("hpu", lazy) == torch.device("hpu")
    assert os.environ["PT_HPU_LAZY_MODE"] == str(int(lazy))
    assert HabanaRuntime(lazy).is_lazy is lazy


@pytest.mark.usefixtures("vendor")
def test_a_mode_cannot_change_after_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not HabanaRuntime(lazy=False).is_lazy
    with pytest.raises(ValueError, match="expected PT_HPU_LAZY_MODE=1"):
        HabanaRuntime(lazy=True)
    imported = "imported habana_frameworks in the other mode: set PT_HPU_LAZY_MODE=1 before Python starts"
    del os.environ["PT_HPU_LAZY_MODE"]
    with pytest.raises(ValueError, match=imported):
        HabanaRuntime(lazy=True)
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    with pytest.raises(ValueError, match=imported):
        HabanaRuntime()


@pytest.mark.usefixtures("vendor")
@pytest.mark.parametrize("default", ["0", "1"])
def test_a_mode_that_nobody_asked_for_is_that_in_which_the_package_was_imported(
    monkeypatch: pytest.MonkeyPatch, default: str
) -> None:
    monkeypatch.setenv("STANDIN_LAZY_DEFAULT", default)
    importlib.import_module("habana_frameworks.torch")
    assert hpu_problem() is None
    assert os.environ["PT_HPU_LAZY_MODE"] == default
    assert HabanaRuntime().is_lazy is (default == "1")
    other = default == "0"
    with pytest.raises(ValueError, match=f"expected PT_HPU_LAZY_MODE={int(other)}"):
        HabanaRuntime(other)


@pytest.mark.slow
@pytest.mark.parametrize(("default", "asked"), every(4, [("0", "1"), ("1", None), ("0", None), ("1", "0")]))
def test_hpu_starts_where_importing_torch_imports_the_package(default: str, asked: str | None) -> None:
    script = """
import sys, torch
assert "habana_frameworks.torch" in sys.modules
from hpu_duo.device import resolve_device, runtime_for
device = resolve_device("auto")
print(device, runtime_for(device).is_lazy)
"""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"PYTHONPATH": os.pathsep.join([str(STANDIN), *sys.path]), "STANDIN_LAZY_DEFAULT": default}
    if asked is not None:
        environment["PT_HPU_LAZY_MODE"] = asked
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["hpu", str((asked or default) == "1")]


@pytest.mark.usefixtures("vendor")
@pytest.mark.parametrize(("lazy", "marks"), [(False, 0), (True, 2)])
def test_a_lazy_step_ends_by_launching_what_it_collected(lazy: bool, marks: int) -> None:
    runtime = HabanaRuntime(lazy)
    for _ in range(2):
        with runtime.step():
            assert not calls()["mark_step"] or lazy
    with pytest.raises(ZeroDivisionError), runtime.step():
        raise ZeroDivisionError
    assert calls()["mark_step"] == marks
    assert calls()["mark_step without effect"] == 0


@pytest.mark.usefixtures("vendor")
def test_memory_and_waiting_are_asked_of_the_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = HabanaRuntime()
    assert runtime.free_bytes() == 700
    assert runtime.memory() == DeviceMemory(limit=1000, in_use=300, peak=450)
    runtime.synchronize()
    assert calls()["synchronize"] == 1
    assert isinstance(runtime, QueuesCopies)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device: self + (device == "hpu"))
    assert runtime.pinned(2).tolist() == [1, 1]


@pytest.mark.usefixtures("vendor")
@pytest.mark.parametrize("lazy", [False, True])
def test_copies_have_a_stream_that_follows_what_is_launched(lazy: bool) -> None:
    """Lazy mode launches its operators before the stream waits, and before each mark."""
    runtime = HabanaRuntime(lazy)
    assert isinstance(runtime, CopiesStaged)
    with (stream := runtime.copy_stream()).after_launched():
        assert (calls()["wait_stream"], calls()["stream"], calls()["mark_step"]) == (1, 1, int(lazy))
        began = stream.mark()
        ended = stream.mark()
    runtime.mark()()
    assert calls()["mark_step"] == 5 * int(lazy)
    assert calls()["mark_step without effect"] == 0
    assert not ended.is_passed
    ended.hold_computation()
    assert calls()["wait_event"] == 1
    ended.wait()
    assert ended.is_passed
    assert ended.seconds_since(began) == 2e-3
    assert calls()["synchronize"] == 0


@pytest.mark.usefixtures("vendor")
def test_hccl_is_known_to_torch_once_the_vendors_module_is_imported() -> None:
    assert HabanaRuntime().collectives() == "hccl"
    assert dist.is_backend_available("hccl")
    assert "habana_frameworks.torch.distributed.hccl" in sys.modules


@pytest.mark.usefixtures("vendor")
def test_each_process_has_a_module_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def modules(num_processes: int) -> list[str | None]:
        environments = process_environments("hpu", num_processes)
        assert {one["PT_HPU_LAZY_MODE"] for one in environments} == {"0"}
        return [one.get("HLS_MODULE_ID") for one in environments]

    assert modules(4) == ["0", "1", "2", "3"]
    assert modules(1) == [None], "any module that is free"
    with pytest.raises(ValueError, match="at most 4 processes, one for each hpu device, got 5"):
        modules(5)
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "6, 7")
    assert modules(2) == ["6", "7"]
    with pytest.raises(ValueError, match="HABANA_VISIBLE_MODULES to list 3 cards, one a process, got '6, 7'"):
        modules(3)
    monkeypatch.setenv("HLS_MODULE_ID", "6")
    with pytest.raises(ValueError, match="got HLS_MODULE_ID=6, which names one card for all of them"):
        modules(2)
    assert modules(1) == [None]


@pytest.mark.usefixtures("vendor")
def test_a_model_is_moved_and_the_switch_for_quantised_ones_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = HabanaRuntime()
    seen: list[Any] = []
    monkeypatch.setattr(nn.Linear, "to", lambda self, device: seen.append((device, calls()["inference"])))
    runtime.place(nn.Linear(2, 2))
    assert seen == [("hpu", 0)]


@pytest.mark.usefixtures("vendor")
@pytest.mark.parametrize("lazy", [False, True])
def test_recipes_outlive_the_process_and_eager_mode_compiles_in_threads(
    lazy: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    values = prepare_environment(lazy)
    assert values["PT_HPU_RECIPE_CACHE_CONFIG"] == f"{tmp_path}/hpu-duo/recipes,false,16384"
    threads = values.get("FUSER_ENABLE_MULTI_THREADED_INVOCATIONS"), values.get("PT_HPU_ENABLE_EAGER_CACHE")
    assert threads == ((None, None) if lazy else ("1", "true"))
    assert values.get("PT_ENABLE_INT64_SUPPORT") == (None if lazy else "0")


@pytest.mark.usefixtures("vendor")
@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("recipes", "expected PT_HPU_RECIPE_CACHE_CONFIG='directory,delete,megabytes'"),
        ("recipes,maybe,1024", "expected PT_HPU_RECIPE_CACHE_CONFIG='directory,delete,megabytes'"),
        ("recipes,false,much", "with a size that is no number"),
        ("recipes,false,0,perhaps", "with true or false for what is no directory and no number"),
        (
            "/proc/recipes,false,1024",
            "expected the recipe cache of PT_HPU_RECIPE_CACHE_CONFIG to be",
        ),
    ],
)
def test_a_recipe_cache_that_cannot_be_used_is_refused(
    config: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", config)
    with pytest.raises(ValueError, match=re.escape(told)):
        prepare_environment()


@pytest.mark.usefixtures("vendor")
def test_a_process_has_a_real_hpu_or_a_simulated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpu_duo.lab.sim.installation._installed", [])
    with pytest.raises(ValueError, match="either a real HPU or a simulated one"):
        sim.install()
    with pytest.raises(ValueError, match="'hpu-sim' is not available: habana_frameworks is installed"):
        resolve_device("hpu-sim")


def test_the_simulated_hpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpu_duo.lab.sim.installation._installed", [])
    monkeypatch.setattr("kernels_ref.native.shutil.which", lambda name: None)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler, and none of g\+\+"):
        resolve_device("hpu-sim")


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor, phase: str = "c--", num_blocks: float = 0) -> torch.Tensor:
        return x * 2


@pytest.fixture
def wrapped(vendor: None) -> nn.Module:
    HabanaRuntime(lazy=True)
    graphs = importlib.import_module("habana_frameworks.torch.hpu")
    return graphs.wrap_in_hpu_graph(Doubling(), disable_tensor_cache=True)


def test_the_stand_in_has_no_graphs_in_eager_mode(vendor: None) -> None:
    HabanaRuntime(lazy=False)
    assert not hasattr(importlib.import_module("habana_frameworks.torch.hpu"), "wrap_in_hpu_graph")


def test_the_stand_in_captures_by_shape_and_python_scalar_and_not_by_dtype(wrapped: nn.Module) -> None:
    for size, phase, num_blocks in [
        (8, "c--", 0),
        (8, "c--", 0),
        (8, "csu", 4),
        (8, "csu", 5),
        (16, "csu", 4),
    ]:
        wrapped(torch.zeros(size), phase, num_blocks=num_blocks)
    assert (calls()["capture"], calls()["replay"]) == (4, 1)
    wrapped(torch.zeros(8, dtype=torch.int32), "c--", num_blocks=0)
    wrapped(torch.zeros(8), "c--", num_blocks=False)
    assert (calls()["capture"], calls()["replay"]) == (4, 3)


def test_the_stand_in_refuses_what_cannot_be_hashed(wrapped: nn.Module) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        wrapped(torch.zeros(8), {1, 2})


def test_the_stand_in_overwrites_results_at_the_next_replay(wrapped: nn.Module) -> None:
    first = wrapped(torch.ones(3))
    assert first.tolist() == [2, 2, 2]
    assert wrapped(torch.full((3,), 5.0)) is first
    assert first.tolist() == [10, 10, 10]
    assert wrapped(torch.ones(3), warmup_mode=True).tolist() == [10, 10, 10]
    assert wrapped(torch.ones(3), bypass_hpu_graphs=True).tolist() == [2, 2, 2]


def test_the_stand_in_computes_garbage_in_compile_only_mode(wrapped: nn.Module) -> None:
    bridge = importlib.import_module("habana_frameworks.torch.internal.bridge_config")
    with bridge.env_setting("PT_COMPILE_ONLY_MODE", True):
        assert wrapped(torch.ones(3)).isnan().all()
    assert wrapped(torch.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", ["cpu:x", "cuda:", "hpu:-1", "cpu:0:1"])
def test_a_device_with_an_index_that_is_no_number_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"such as 'cpu' or 'cuda:0', got '{name}'"):
        resolve_device(name)
