"""Refusals of launch.sh to read settings, each in one sentence that says what to do."""

import re
from pathlib import Path

import pytest

from tests.examples.gaudi.gaudi_server import GAUDI, SIMULATED, Server, refusal


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("MAX_MODEL_LENGTH=512", "line 1: MAX_MODEL_LENGTH is no variable of a deployment"),
        ("MAX_MODEL_LEN 512", "line 1: expected NAME=value"),
        ("export DEVICE=hpu", "line 1: expected NAME=value"),
        ('MODEL="/models/llama"', "write MODEL without quotes"),
        ("DEVICE=gpu", "expected DEVICE to be one of hpu hpu-sim cpu, got 'gpu'"),
        ("HARDWARE=gaudi4", "expected HARDWARE to be one of gaudi2 gaudi3, got 'gaudi4'"),
        ("MAX_NUM_SEQS=many", "expected MAX_NUM_SEQS to be a whole number, got 'many'"),
        ("MAX_NUM_SEQS=-1", "expected MAX_NUM_SEQS to be a whole number, got '-1'"),
        ("GRAPHS_BUDGET=0", "expected GRAPHS_BUDGET to be at least 1, got '0'"),
        ("PORT=", "expected a value of PORT, got none"),
        ("MODEL=", "expected a value of MODEL, got none"),
        ("PROFILE_STEPS=4", "PROFILE_STEPS=4 needs PROFILE_DIR"),
        ("SPARSITY=0.5", "SPARSITY=0.5 needs PATTERN"),
    ],
)
def test_a_wrong_env_file_ends_with_one_sentence(
    server: Server, tmp_path: Path, line: str, said: str
) -> None:
    file = tmp_path / "wrong.env"
    file.write_text(line + "\n", encoding="utf-8")
    done = server.launch("--env", str(file), "check")
    assert said in refusal(done)
    assert len(done.stderr.splitlines()) == 1


def test_a_refusal_names_a_list_of_variables_that_exists(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "wrong.env"
    file.write_text("MAX_MODEL_LENGTH=512\n", encoding="utf-8")
    named = re.search(r"; (\S+) lists", refusal(server.launch("--env", str(file), "check")))
    assert named is not None
    assert (GAUDI / named[1]).is_file()


@pytest.mark.parametrize("name", ["/nowhere.env", str(GAUDI)])
def test_an_env_file_that_is_none_is_refused(server: Server, name: str) -> None:
    assert "env/gaudi3.env" in refusal(server.launch("--env", name))


@pytest.mark.parametrize("arguments", [("serv",), ("--dry",), ("check", "warm")])
def test_unknown_steps_and_options_are_refused(server: Server, arguments: tuple[str, ...]) -> None:
    assert "check limits plan warmup verify serve" in refusal(server.launch(*arguments))


def test_a_state_directory_must_be_a_whole_path_without_commas(server: Server) -> None:
    for state in ("state", "/tmp/a,b", "/tmp/a b"):
        assert "absolute path" in refusal(server.launch("check", STATE_DIR=state))


def test_the_environment_comes_before_the_file_and_says_so(server: Server) -> None:
    done = server.launch("--env", SIMULATED, "check", MODEL="/models/mine")
    assert done.returncode == 0, done.stderr
    assert "MODEL=/models/mine of the environment comes before MODEL=builtin" in done.stderr


def test_values_that_may_be_secret_are_not_printed(server: Server, tmp_path: Path) -> None:
    names = ("HF_TOKEN", "https_proxy", "HTTP_PROXY")
    file = tmp_path / "secret.env"
    settings = Path(SIMULATED).read_text(encoding="utf-8") + "".join(f"{name}=abc1\n" for name in names)
    file.write_text(settings, encoding="utf-8")
    done = server.launch("--env", str(file), "check", **dict.fromkeys(names, "http://me:abc2@proxy"))
    for name in names:
        assert f"{name} of the environment comes before that of {file}" in done.stderr
    assert "abc" not in done.stderr


def test_variables_for_the_vendor_and_the_network_are_passed_on(server: Server, tmp_path: Path) -> None:
    names = (
        "HCCL_OVER_OFI",
        "GLOO_SOCKET_IFNAME",
        "https_proxy",
        "PT_HPU_METRICS_FILE",
        "PT_ENABLE_INT64_SUPPORT",
    )
    file = tmp_path / "passed.env"
    settings = Path(SIMULATED).read_text(encoding="utf-8") + "".join(f"{name}=it\n" for name in names)
    file.write_text(settings, encoding="utf-8")
    server.has_command("hpu-duo", '#!/bin/sh\nenv > "$STATE_DIR/environment"\nexit 1\n')
    server.state.mkdir()
    server.launch("--env", str(file), "limits", "plan")
    seen = (server.state / "environment").read_text(encoding="utf-8").splitlines()
    assert {f"{name}=it" for name in names} <= set(seen)


def test_a_user_without_a_name_is_named_by_its_number(server: Server) -> None:
    server.has_command("id", '#!/bin/sh\n[ "$1" = -u ] && echo 1000650000\n')
    said = refusal(server.launch("--env", SIMULATED, "check", STATE_DIR="/proc/nowhere"))
    assert "give it to user 1000650000, or name" in said


def test_lines_that_end_as_on_windows_are_read(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "dos.env"
    file.write_bytes(b"# a comment\r\n\r\nDEVICE=hpu-sim\r\nMIN_FREE_GIB=0")
    done = server.launch("--env", str(file), "check")
    assert done.returncode == 0, done.stderr


def test_numbers_may_begin_with_noughts(server: Server) -> None:
    refused = server.launch("--env", SIMULATED, "check", MIN_FREE_GIB="0999999999")
    assert "need 0999999999" in refusal(refused)
    assert "value too great for base" not in refused.stderr


def test_help_names_every_step(server: Server) -> None:
    shown = server.launch("--help")
    assert shown.returncode == 0
    for step in ("check", "limits", "plan", "warmup", "verify", "serve", "--dry-run", "--again"):
        assert f"  {step}" in shown.stdout
