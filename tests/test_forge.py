"""Files for forges and editors: they are valid, and call targets that the Makefile has."""

import re
import sys
from pathlib import Path
from subprocess import run

import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_workflows_fit_the_schema() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    command = [*check, *map(str, WORKFLOWS)]
    done = run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_call_targets_of_the_makefile() -> None:
    jobs = [job for path in WORKFLOWS for job in yaml.safe_load(path.read_text())["jobs"].values()]
    called = {step["run"] for job in jobs for step in job["steps"] if "run" in step}
    assert {"make test", "make test NEWEST=1"} <= called
    assert {command.split()[1] for command in called} <= TARGETS


def test_hooks_run_what_make_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    tools = {hook["entry"].split()[0].rpartition("/")[2] for hook in hooks}
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint is not None
    assert tools == set(re.findall(r"\$\(BIN\)/([\w-]+)", lint[1]))
