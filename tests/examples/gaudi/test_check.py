"""Step check of launch.sh, on servers that lack something."""

import shutil

import pytest

from tests.examples.gaudi.gaudi_server import GAUDI, GAUDI3, SIMULATED, VENDOR, Server, refusal
from tests.tiers import every

ENV = ("--env", str(GAUDI / "env" / "gaudi3.env"))
SMALL = {"MIN_FREE_GIB": "0"}
GAUDI2 = "HL-225 0000:19:00.0 1.24.1-ca59b5a 672 98304"
BUSY = "HL-325L 0000:cc:00.0 1.24.1-ca59b5a 90000 131072"


@pytest.mark.slow
def test_a_card_is_told_with_its_driver_node_and_cores(server: Server) -> None:
    server.has_cards(GAUDI3)
    done = server.launch(*ENV, "check", **SMALL)
    assert done.returncode == 0, done.stderr
    for said in (
        "driver 1.24.1-ca59b5a",
        "card 0, HL-325L, 672 of 131072 MiB in use",
        "NUMA node 0, cores 0",
        "1024 huge pages of 2048 KiB",
    ):
        assert said in done.stderr
    assert "different releases" not in done.stderr


def test_without_the_vendors_tool_the_driver_is_asked_for(server: Server) -> None:
    server.has_cards(GAUDI3)
    tool = shutil.which("hl-smi", path=server.environment["PATH"])
    assert tool is not None
    server.environment["PATH"] = server.environment["PATH"].partition(":")[2]
    assert "hl-smi is not on the path" in refusal(server.launch(*ENV, "check", **SMALL))


@pytest.mark.parametrize("visible", ["", "all", "3"])
def test_missing_cards_end_with_what_to_look_at(server: Server, visible: str) -> None:
    server.has_cards()
    said = refusal(server.launch(*ENV, "check", HABANA_VISIBLE_DEVICES=visible, **SMALL))
    assert f"lists no card: HABANA_VISIBLE_DEVICES is '{visible or 'not set'}'" in said


def test_a_driver_that_is_not_loaded_ends_with_how_to_load_it(server: Server) -> None:
    server.has_cards(GAUDI3)
    said = refusal(server.launch(*ENV, "check", HL_SMI_FAILS="no driver", **SMALL))
    assert "no driver" in said
    assert "modprobe habanalabs" in said


def test_a_card_of_another_generation_is_refused(server: Server) -> None:
    server.has_cards(GAUDI2)
    said = refusal(server.launch(*ENV, "check", **SMALL))
    assert "HARDWARE=gaudi3, but card 0 is of Gaudi 2 (HL-225)" in said


@pytest.mark.slow
def test_the_card_with_the_most_free_memory_is_taken_and_a_driver_of_another_release_told(
    server: Server,
) -> None:
    server.has_cards(*(card.replace("1.24.1-ca59b5a", "1.22.0-fe67a1") for card in (BUSY, GAUDI3)))
    done = server.launch(*ENV, "check", **SMALL)
    assert done.returncode == 0, done.stderr
    assert "takes module 6 of 2 cards" in done.stderr
    assert "driver 1.22.0-fe67a1 and habana-torch-plugin 1.24.1.5 are of different releases" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("option", every(2, ["TENSOR_PARALLEL_SIZE", "REPLICAS"]))
def test_as_many_cards_as_share_the_model_are_taken_those_with_the_most_free_memory(
    server: Server, option: str
) -> None:
    server.has_cards(GAUDI3, BUSY, GAUDI3)
    done = server.launch(*ENV, "check", **{option: "2"}, **SMALL)
    assert done.returncode == 0, done.stderr
    assert "takes modules 5,7 of 3 cards" in done.stderr


def test_fewer_cards_than_share_the_model_and_cards_in_use_are_refused(server: Server) -> None:
    server.has_cards(GAUDI3, BUSY)
    said = refusal(server.launch(*ENV, "check", TENSOR_PARALLEL_SIZE="8", **SMALL))
    assert "TENSOR_PARALLEL_SIZE=8 and REPLICAS=1 take 8 cards, and 2 are visible" in said
    said = refusal(server.launch(*ENV, "check", REPLICAS="2", TENSOR_PARALLEL_SIZE="2", **SMALL))
    assert "take 4 cards, and 2 are visible" in said
    said = refusal(server.launch(*ENV, "check", TENSOR_PARALLEL_SIZE="2", **SMALL))
    assert "card 1 is one of the 2 with the most free memory, and has more than a quarter in use" in said
    said = refusal(server.launch(*ENV, "check", TENSOR_PARALLEL_SIZE="0", **SMALL))
    assert "expected TENSOR_PARALLEL_SIZE to be at least 1" in said


def test_cards_that_are_all_in_use_are_refused(server: Server) -> None:
    server.has_cards(BUSY)
    assert "more than a quarter of its memory in use" in refusal(server.launch(*ENV, "check", **SMALL))


def test_too_few_huge_pages_end_with_the_command_that_makes_them(server: Server) -> None:
    server.has_cards(GAUDI3)
    said = refusal(server.launch(*ENV, "check", MIN_HUGE_PAGES="47500", **SMALL))
    assert "sudo sysctl -w vm.nr_hugepages=47500" in said


def test_an_environment_without_the_vendors_torch_is_refused(server: Server) -> None:
    server.has_cards(GAUDI3)
    packages = server.environment["PYTHONPATH"].split(":")
    server.environment["PYTHONPATH"] = packages[0]
    assert "habana-torch-plugin is missing" in refusal(server.launch(*ENV, "check", **SMALL))


@pytest.mark.slow
def test_a_device_that_the_package_cannot_use_is_refused_with_its_reason(server: Server) -> None:
    server.has_cards(GAUDI3)
    packages = server.environment["PYTHONPATH"].split(":")
    server.environment["PYTHONPATH"] = ":".join(one for one in packages if one != str(VENDOR))
    said = refusal(server.launch(*ENV, "check", **SMALL))
    assert "the device hpu is not usable" in said
    assert "hpu-duo doctor" in said


def test_a_full_volume_is_refused_before_anything_is_written(server: Server) -> None:
    server.has_command("df", "#!/bin/sh\necho head\necho disk 100000000 97000000 3145728 97% /\n")
    said = refusal(server.launch("--env", SIMULATED, "check", MIN_FREE_GIB="20"))
    assert "has 3 GiB left" in said
    assert "need 20: make room" in said


def test_a_state_directory_that_cannot_be_made_is_refused(server: Server) -> None:
    said = refusal(server.launch("--env", SIMULATED, "check", STATE_DIR="/proc/hpu-duo"))
    assert "cannot be made" in said


def test_a_package_that_is_missing_ends_with_how_to_install_it(server: Server) -> None:
    server.environment["PATH"] = "/usr/bin:/bin"
    assert f"pip install '{GAUDI.parent.parent}[serve]'" in refusal(
        server.launch("--env", SIMULATED, "check")
    )


def test_a_simulated_device_is_not_looked_for(server: Server) -> None:
    done = server.launch("--env", SIMULATED, "check")
    assert done.returncode == 0, done.stderr
    assert "DEVICE=hpu-sim: driver, cards, huge pages and cores are not looked at" in done.stderr


def test_a_dry_run_makes_no_directory(server: Server) -> None:
    done = server.launch("--env", SIMULATED, "--dry-run", "check")
    assert done.returncode == 0, done.stderr
    assert not server.state.exists()
