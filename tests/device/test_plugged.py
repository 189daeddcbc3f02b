"""Devices that plug in are known by name, and loaded when their name is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hpu_duo.device import NAMES, PLUGGED, resolve_device, runtime_for
from hpu_duo.device.runtime import PluggedDevice, plugged, taken_runtime


@pytest.mark.parametrize("name", PLUGGED)
def test_a_plugged_device_answers_what_is_asked_of_one(name: str) -> None:
    device = plugged(name)
    asked = [member for member in vars(PluggedDevice) if not member.startswith("_")]
    assert asked == ["problem", "take", "runtime"]
    assert all(callable(getattr(device, member)) for member in asked)
    assert name in NAMES


@pytest.mark.parametrize("name", PLUGGED)
def test_a_plugged_device_runs_what_another_one_would_once_it_is_taken(name: str) -> None:
    reason = plugged(name).problem()
    if reason is not None:
        pytest.skip(reason)
    device = resolve_device(name)
    taken = taken_runtime()
    assert taken is not None
    assert taken.name == runtime_for(device).name == name
    assert runtime_for(torch.device("cpu")).name == "cpu"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_nobody_who_serves_or_audits_loads_one_that_is_not_asked_for() -> None:
    script = """
import sys
import hpu_duo.llm, hpu_duo.lab.audit, hpu_duo.cli.app
import hpu_duo.startup.recorded_steps, hpu_duo.startup.warm_up
from hpu_duo.device import resolve_device, runtime_for
from hpu_duo.device.runtime import taken_runtime
assert runtime_for(resolve_device("cpu")).name == "cpu"
assert taken_runtime() is None
loaded = [name for name in sys.modules if name == "hpu_duo.lab.sim" or name.startswith("hpu_duo.lab.sim.")]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
