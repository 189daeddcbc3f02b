"""Scripts and YAML files of examples/gaudi are clean by the linters of their languages."""

from tests.examples.gaudi.gaudi_server import GAUDI
from tests.examples.gaudi.tools import run_tool

SCRIPTS = sorted([*GAUDI.glob("*.sh"), *GAUDI.glob("operate/*.sh")])
LIBRARY = sorted(GAUDI.glob("lib/*.sh"))


def test_scripts_are_clean_by_shellcheck() -> None:
    run_tool("shellcheck", "--external-sources", f"--source-path={GAUDI}", *SCRIPTS, *LIBRARY)


def test_scripts_can_be_run_and_stop_at_the_first_error() -> None:
    assert SCRIPTS
    for path in SCRIPTS:
        assert path.stat().st_mode & 0o111, path
        text = path.read_text(encoding="utf-8")
        assert text.startswith("#!/usr/bin/env bash\n"), path
        assert "\nset -euo pipefail\n" in text, path


def test_yaml_files_are_clean_by_yamllint() -> None:
    files = sorted([*GAUDI.rglob("*.yaml"), *GAUDI.rglob("*.yml")])
    run_tool("yamllint", "--strict", "--config-file", GAUDI / ".yamllint", *files)
