"""Dockerfile, compose file and systemd unit: clean, and at one with each other and the package."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import threading
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples.gaudi.gaudi_server import GAUDI, ROOT
from tests.examples.gaudi.tools import run_tool

DOCKERFILE = (GAUDI / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((GAUDI / "compose.yaml").read_text(encoding="utf-8"))
FOR_CARDS = tuple(f"gaudi{number}{kind}.env" for number in (2, 3) for kind in ("", "-8", "-replicas"))
SERVICE = COMPOSE["services"]["server"]


def test_the_dockerfile_is_clean_by_hadolint() -> None:
    run_tool("hadolint", "--failure-threshold", "info", GAUDI / "Dockerfile")


def test_the_compose_file_keeps_to_the_compose_specification(tmp_path: Path) -> None:
    run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", GAUDI / "compose.yaml")
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((GAUDI / "compose.yaml").read_text(encoding="utf-8").replace("runtime:", "run_time:"))
    with pytest.raises(AssertionError, match="run_time"):
        run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", wrong)


def test_the_image_is_made_of_files_that_exist_and_are_sent() -> None:
    sent = (GAUDI / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in sent, source
    packages = {"hpu_duo", "graphs", "kernels_ref", "bias_builders"}
    assert packages <= set(re.findall(r"^COPY (\w+) ", DOCKERFILE, re.MULTILINE))


def test_the_extras_of_the_image_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.search(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.MULTILINE)
    assert extras is not None
    for name in extras[1].split(","):
        assert re.search(rf"^{name} = \[", project, re.MULTILINE), name


def test_the_image_runs_as_a_user_whose_group_owns_its_volumes() -> None:
    assert "\nUSER 10001:0\n" in DOCKERFILE
    assert "\n    && chmod --recursive g=u /home/duo " in DOCKERFILE
    volumes = re.search(r"^VOLUME \[(.*)\]$", DOCKERFILE, re.MULTILINE)
    made = re.search(r"install --directory --owner duo --group 0 --mode 0775 (.*)$", DOCKERFILE, re.MULTILINE)
    assert volumes is not None
    assert made is not None
    assert volumes[1].replace('"', "").split(", ") == made[1].split()
    assert {one.rpartition(":")[2] for one in SERVICE["volumes"]} == set(made[1].split())


def test_compose_asks_for_what_the_vendors_commands_ask_for() -> None:
    assert SERVICE["runtime"] == "habana"
    assert SERVICE["cap_add"] == ["SYS_NICE"]
    assert SERVICE["ipc"] == "host"
    assert (GAUDI / "env" / "gaudi3.env").is_file()
    assert SERVICE["env_file"][1] == "${HPU_DUO_ENV:-env/gaudi3.env}"
    assert (GAUDI / SERVICE["build"]["context"]).resolve() == ROOT
    assert (ROOT / SERVICE["build"]["dockerfile"]).is_file()


def test_an_env_file_comes_before_the_defaults_of_compose() -> None:
    """Compose lets ``environment`` come before ``env_file``, and a later file before an earlier one."""
    first = (GAUDI / SERVICE["env_file"][0]).read_text(encoding="utf-8")
    assert set(re.findall(r"^(\w+)=", first, re.MULTILINE)) == {"HABANA_VISIBLE_DEVICES", "HF_TOKEN"}
    assert set(SERVICE["environment"]) == {"HOST", "PORT"}
    # Wherever the server is published, it listens where compose and the health check look.
    assert {port.rpartition(":")[2] for port in SERVICE["ports"]} == {SERVICE["environment"]["PORT"]}


def test_a_refusal_is_not_repeated_for_ever_and_signals_arrive() -> None:
    assert re.fullmatch(r"on-failure:\d", SERVICE["restart"])
    assert SERVICE["init"] is True


def test_settings_of_ones_own_are_neither_sent_nor_committed() -> None:
    """The last line that matches decides, as in .gitignore."""
    lines = (GAUDI / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()

    def is_sent(path: str) -> bool:
        rules = [line for line in lines if fnmatch(path, line.lstrip("!")) or path.startswith(line[1:] + "/")]
        return rules[-1].startswith("!")

    shipped = ("compose.env", "simulated.env", "variables.yaml", *FOR_CARDS)
    assert all(is_sent(f"examples/gaudi/env/{name}") for name in shipped)
    assert not is_sent("examples/gaudi/env/my.env")
    assert not is_sent("examples/gaudi/env/other.env")
    assert "/examples/gaudi/env/my.env" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_nobody_outside_of_the_host_may_call_unless_it_is_asked_for() -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICE["ports"])
    for name in FOR_CARDS:
        assert "\nHOST=127.0.0.1\n" in (GAUDI / "env" / name).read_text(encoding="utf-8")


def test_the_unit_starts_the_script_and_has_its_directories() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(GAUDI / "systemd" / "hpu-duo.service", encoding="utf-8")
    service = unit["Service"]
    assert service["ExecStart"] == "/opt/hpu-duo/gaudi/launch.sh"
    assert service["StateDirectory"] == service["CacheDirectory"] == "hpu-duo"
    assert service["RestartPreventExitStatus"] == "2"
    # Processes that share a model are ended by the first one, to which alone SIGTERM goes.
    assert service["KillMode"] == "mixed"
    for name in FOR_CARDS:
        text = (GAUDI / "env" / name).read_text(encoding="utf-8")
        assert "\nSTATE_DIR=/var/lib/hpu-duo\n" in text
        assert "\nHF_HOME=/var/cache/hpu-duo/hub\n" in text


class _Health(BaseHTTPRequestHandler):
    """Answers /live with the status of its server."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(self.server.status if self.path == "/live" else 404)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_is_that_of_the_server(status: int, code: int) -> None:
    command = [sys.executable, str(GAUDI / "lib" / "healthy.py")]
    with HTTPServer(("127.0.0.1", 0), _Health) as server:
        server.status = status  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        done = subprocess.run(command, env={"PORT": str(server.server_port)}, capture_output=True, text=True)
        server.shutdown()
        thread.join()
        port = server.server_port
    assert done.returncode == code, done.stderr
    assert subprocess.run(command, env={"PORT": str(port)}, capture_output=True).returncode == 1
