"""Whether devices can exchange data, as far as it can be told without them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from typer.testing import CliRunner

from hpu_duo.cli.app import app
from hpu_duo.lab.collectives_check import Exchange, check_collectives, check_values
from tests.vendor import importable

NUM_BYTES = 4096


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_simulated_hpus_exchange_over_gloo() -> None:
    found = check_collectives("hpu-sim", 2, NUM_BYTES)
    assert (found.backend, found.devices, found.num_bytes) == ("gloo", ("hpu:0", "hpu:0"), NUM_BYTES)
    assert found.seconds > 0


@pytest.mark.slow
@pytest.mark.usefixtures("vendor")
def test_hpus_exchange_over_hccl_each_process_on_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "2,3")
    found = check_collectives("hpu", 2, NUM_BYTES)
    assert (found.backend, found.devices) == ("hccl", ("hpu (module 2)", "hpu (module 3)"))


@pytest.mark.slow
@pytest.mark.usefixtures("vendor")
def test_the_doctor_says_what_is_wrong_and_exits_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_HCCL_FAULT", "no port is up")
    result = CliRunner().invoke(app, ["doctor", "--collectives", "1", "--device", "hpu", "--json"])
    assert result.exit_code == 1
    (finding,) = (one for one in json.loads(result.stdout) if one["topic"] == "collectives")
    assert finding["is_usable"] is False
    assert finding["detail"] == "process 0 failed: RuntimeError: no port is up"
    assert "Traceback" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--device", "cpu", "--collectives", "0"), "at least 1 process, got 0"),
        (("--device", "hpu", "--collectives", "2"), "habana_frameworks is not installed"),
        (("--device", "cpu:1", "--collectives", "2"), "expected 'cpu' without a number, got 'cpu:1'"),
    ],
)
def test_what_cannot_be_checked_is_refused(arguments: tuple[str, ...], told: str) -> None:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr


@pytest.mark.parametrize("num_bytes", [3, 0, -4, 4098])
def test_a_sum_over_no_whole_number_of_values_is_refused(num_bytes: int) -> None:
    with pytest.raises(
        ValueError, match=f"^expected num_bytes to be a positive multiple of 4, got {num_bytes}$"
    ):
        check_collectives("cpu", 1, num_bytes)


def test_a_wrong_value_is_found_wherever_it_is() -> None:
    right = torch.arange(1000.0)
    check_values("all_reduce", right.clone(), right)
    wrong = right.clone()
    wrong[[700, 900]] = float("nan")
    with pytest.raises(RuntimeError, match=r"left 2 of 1000 values wrong: expected 700\.0 at 700, got"):
        check_values("all_reduce", wrong, right)


def test_the_bandwidth_is_what_a_ring_sends() -> None:
    assert Exchange("hccl", ("hpu",) * 8, 800, 2.0).bus_bandwidth == 700
    assert Exchange("hccl", ("hpu",), 800, 2.0).bus_bandwidth == 0


@pytest.mark.gpu
def test_gpus_exchange_over_nccl() -> None:
    count = min(2, torch.cuda.device_count())
    found = check_collectives("cuda", count, NUM_BYTES)
    assert (found.backend, found.devices) == ("nccl", ("cuda:0", "cuda:1")[:count])
