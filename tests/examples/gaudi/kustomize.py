"""Build a kustomization by the rules that examples/gaudi uses, where kustomize itself is not installed.

``test_kustomize.py`` compares both.
Resources, components, strategic merges, images, namespace and config maps from files of variables; anything
else in a kustomization is refused, so that no rule is left out in silence.
Source: the reference of kustomization.yaml, kubectl.docs.kubernetes.io.
"""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]
_KNOWN = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "components",
    "patches",
    "images",
    "configMapGenerator",
}


def build(directory: Path) -> list[Resource]:
    """The resources of a kustomization, as ``kubectl kustomize`` prints them."""
    return _built(directory.resolve(), [])


def _built(directory: Path, found: list[Resource]) -> list[Resource]:
    file = directory / "kustomization.yaml"
    text = yaml.safe_load(file.read_text(encoding="utf-8"))
    unknown = set(text) - _KNOWN
    assert not unknown, f"{file}: {unknown} is not built by this test"
    for name in text.get("resources", ()):
        path = _inside(directory, name)
        if path.is_dir():
            found = found + _built(path, [])
        else:
            found = found + list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for each in text.get("configMapGenerator", ()):
        found = [*found, _config_map(directory, each)]
    for name in text.get("components", ()):
        found = _built(_inside(directory, name), found)
    for each in text.get("patches", ()):
        assert set(each) <= {"path", "target"}, f"{file}: {each}"
        patch = yaml.safe_load(_inside(directory, each["path"]).read_text(encoding="utf-8"))
        targets = [one for one in found if _key(one) == _key(patch)]
        if "target" in each:  # as many as there are, none included
            assert each["target"] == {"kind": patch["kind"], "name": patch["metadata"]["name"]}, (
                f"{file}: {each}"
            )
        else:
            assert len(targets) == 1, f"{file}: {_key(patch)} is the name of {len(targets)} resources"
        found = [_merged(one, patch) if _key(one) == _key(patch) else one for one in found]
    for image in text.get("images", ()):
        found = [_with_image(one, image) for one in found]
    if "namespace" in text:
        found = [_merged(one, {"metadata": {"namespace": text["namespace"]}}) for one in found]
    maps = {each["name"] for each in text.get("configMapGenerator", ())}
    return _with_hashes(found, maps)


def _inside(directory: Path, name: str) -> Path:
    """A path of a kustomization; files, though not other kustomizations, lie below it."""
    path = (directory / name).resolve()
    assert path.exists(), f"{directory}: {name} does not exist"
    assert path.is_dir() or path.is_relative_to(directory), f"{directory}: {name} lies outside"
    return path


def _key(resource: Resource) -> tuple[str, str, str]:
    return resource["apiVersion"], resource["kind"], resource["metadata"]["name"]


def _config_map(directory: Path, asked: dict[str, Any]) -> Resource:
    assert set(asked) == {"name", "envs"}, asked
    data = {}
    for name in asked["envs"]:
        for line in _inside(directory, name).read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                key, separator, value = line.partition("=")
                assert separator, line
                data[key] = value
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": asked["name"]}, "data": data}


_MAY_GROW = {"volumes", "volumeMounts"}
"""Lists to which a patch may add; another new name is taken for a wrong one."""


def _merged(base: Any, patch: Any, field: str = "") -> Any:
    """A strategic merge; lists of things with names are merged by name, and null takes a field away."""
    if isinstance(base, dict) and isinstance(patch, dict):
        both = {key: _merged(base[key], patch[key], key) for key in base.keys() & patch.keys()}
        merged = {**copy.deepcopy(base), **copy.deepcopy(patch), **both}
        return {key: value for key, value in merged.items() if value is not None}
    if isinstance(base, list) and isinstance(patch, list) and all("name" in one for one in [*base, *patch]):
        patches = {one["name"]: one for one in patch}
        unknown = set(patches) - {one["name"] for one in base}
        assert not unknown or field in _MAY_GROW, f"the patch names {unknown}, which is not there"
        # kustomize puts what is new first.
        added = [copy.deepcopy(one) for one in patch if one["name"] in unknown]
        return added + [_merged(one, patches.get(one["name"], {})) for one in base]
    return copy.deepcopy(patch)


def _with_image(node: Any, image: dict[str, str]) -> Any:
    if isinstance(node, dict):
        found = {key: _with_image(value, image) for key, value in node.items()}
        name = found.get("image")
        if isinstance(name, str) and name.partition(":")[0] == image["name"]:
            found["image"] = f"{image['newName']}:{image['newTag']}"
        return found
    return [_with_image(one, image) for one in node] if isinstance(node, list) else node


def _with_hashes(found: list[Resource], maps: set[str]) -> list[Resource]:
    """Give generated maps names that change with what they hold, and every reference too."""
    names = {}
    for one in found:
        if one["kind"] == "ConfigMap" and one["metadata"]["name"] in maps:
            digest = hashlib.sha256(json.dumps(one["data"], sort_keys=True).encode()).hexdigest()[:10]
            names[one["metadata"]["name"]] = f"{one['metadata']['name']}-{digest}"

    def renamed(node: Any, is_reference: bool = False) -> Any:
        if isinstance(node, dict):
            return {
                key: names.get(value, value)
                if key == "name" and is_reference
                else renamed(value, key == "configMapRef")
                for key, value in node.items()
            }
        return [renamed(one) for one in node] if isinstance(node, list) else node

    def own(one: Resource) -> Resource:
        return _merged(
            one, {"metadata": {"name": names.get(one["metadata"]["name"], one["metadata"]["name"])}}
        )

    return [own(one) if one["kind"] == "ConfigMap" else renamed(one) for one in found]
