"""The manifests: built for each overlay, valid by the schemas of Kubernetes, and true to launch.sh."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.examples.gaudi.gaudi_server import GAUDI
from tests.examples.gaudi.kustomize import Resource, build

KUBERNETES = GAUDI / "kubernetes"
OVERLAYS = sorted(KUBERNETES.glob("overlays/*"))
NOT_OF_KUBERNETES = {"ServiceMonitor"}
"""Kinds of the Prometheus operator, for which kubernetes-validate has no schema."""


@pytest.fixture(params=OVERLAYS, ids=lambda path: path.name)
def overlay(request: pytest.FixtureRequest) -> Path:
    """The directory of an overlay."""
    return request.param


def only(resources: list[Resource], kind: str) -> Resource:
    found = [one for one in resources if one["kind"] == kind]
    assert len(found) == 1, kind
    return found[0]


def pod(resources: list[Resource]) -> dict[str, Any]:
    return only(resources, "StatefulSet")["spec"]["template"]["spec"]


def num_cards(overlay: Path) -> int:
    """Cards of a pod, by the name of the overlay."""
    return 8 if "-" in overlay.name else 1


def test_there_is_an_overlay_for_each_generation_and_for_one_card_and_eight() -> None:
    assert [path.name for path in OVERLAYS] == [
        *("gaudi2", "gaudi2-8", "gaudi2-replicas"),
        *("gaudi3", "gaudi3-8", "gaudi3-replicas"),
    ]


def test_every_manifest_is_valid_by_the_schemas_of_kubernetes(overlay: Path) -> None:
    kinds = []
    for one in build(overlay):
        kinds.append(one["kind"])
        if one["kind"] not in NOT_OF_KUBERNETES:
            kubernetes_validate.validate(one, "1.31", strict=True)
            kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
    assert sorted(kinds) == ["ConfigMap", "PodDisruptionBudget", "Service", "ServiceMonitor", "StatefulSet"]


def test_a_manifest_that_is_wrong_is_found_by_the_schemas(overlay: Path) -> None:
    wrong = only(build(overlay), "StatefulSet")
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.31", strict=True)


def test_cards_and_huge_pages_for_each_are_asked_for_by_both_containers(overlay: Path) -> None:
    resources = build(overlay)
    spec, cards = pod(resources), num_cards(overlay)
    settings = only(resources, "ConfigMap")["data"]
    assert int(settings.get("TENSOR_PARALLEL_SIZE", 1)) * int(settings.get("REPLICAS", 1)) == cards
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["resources"]["limits"]["habana.ai/gaudi"] == cards
        assert container["resources"]["limits"]["hugepages-2Mi"] == f"{4400 * cards}Mi"
        assert container["resources"]["requests"]["cpu"] == str(8 * cards)
        assert container["image"] == "registry.example/hpu-duo:gaudi"
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_NICE"]}
    assert spec["securityContext"]["runAsNonRoot"] is True


def test_the_init_container_warms_up_what_the_server_serves(overlay: Path) -> None:
    spec = pod(build(overlay))
    (first,), (second,) = spec["initContainers"], spec["containers"]
    order = re.search(r"ORDER=\((.*)\)", (GAUDI / "launch.sh").read_text(encoding="utf-8"))
    assert order is not None
    steps = order[1].split()
    assert [step for step in steps if step in first["args"]] == first["args"]
    assert "warmup" in first["args"]
    assert second["args"] == ["serve"]
    for shared in ("envFrom", "volumeMounts", "resources", "image"):
        assert first[shared] == second[shared]


def test_probes_ask_what_the_server_answers(overlay: Path) -> None:
    resources = build(overlay)
    (container,) = pod(resources)["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/live", "port": "http"}
    assert container["startupProbe"]["httpGet"] == {"path": "/live", "port": "http"}
    assert only(resources, "Service")["spec"]["ports"][0]["targetPort"] == "http"
    assert only(resources, "ServiceMonitor")["spec"]["endpoints"][0]["port"] == "http"


def test_pods_are_found_by_service_budget_and_monitor(overlay: Path) -> None:
    resources = build(overlay)
    labels = only(resources, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    service = only(resources, "Service")
    assert only(resources, "StatefulSet")["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    assert only(resources, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert (
        only(resources, "ServiceMonitor")["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    )


def test_the_settings_reach_the_pod_and_name_its_volumes(overlay: Path) -> None:
    resources = build(overlay)
    settings = only(resources, "ConfigMap")
    spec = pod(resources)
    mounts = {one["mountPath"] for one in spec["containers"][0]["volumeMounts"]}
    assert spec["containers"][0]["envFrom"] == [
        {"configMapRef": {"name": settings["metadata"]["name"]}},
        {"secretRef": {"name": "hpu-duo-secrets", "optional": True}},
    ]
    assert settings["metadata"]["name"].startswith("hpu-duo-")
    assert settings["data"]["HARDWARE"] == overlay.name.partition("-")[0]
    assert settings["data"]["HOST"] == "0.0.0.0"
    assert settings["data"]["STATE_DIR"] in mounts
    assert any(settings["data"]["HF_HOME"].startswith(mount) for mount in mounts)
    claims = {
        one["metadata"]["name"] for one in only(resources, "StatefulSet")["spec"]["volumeClaimTemplates"]
    }
    claims |= {one["name"] for one in spec["volumes"]}
    assert claims == {one["name"] for one in spec["containers"][0]["volumeMounts"]}
    assert all(one["metadata"]["namespace"] == "hpu-duo" for one in resources)


def built_with(overlay: Path, directory: Path, *names: str) -> list[Resource]:
    """The resources of an overlay with more components."""
    text = yaml.safe_load((overlay / "kustomization.yaml").read_text(encoding="utf-8"))
    text["resources"] = [str((overlay / one).resolve()) for one in text["resources"]]
    text["components"] = [str((overlay / one).resolve()) for one in text["components"]]
    text["components"] += [str(KUBERNETES / "components" / name) for name in names]
    (directory / "settings.env").write_text((overlay / "settings.env").read_text(encoding="utf-8"))
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
    resources = build(directory)
    for one in resources:
        if one["kind"] not in NOT_OF_KUBERNETES:
            kubernetes_validate.validate(one, "1.31", strict=True)
    return resources


def with_component(overlay: Path, name: str, directory: Path) -> dict[str, Any]:
    """The pod of an overlay with one more component."""
    return pod(built_with(overlay, directory, name))


def test_a_pod_takes_the_hosts_shared_memory_only_if_asked_to(overlay: Path, tmp_path: Path) -> None:
    assert "hostIPC" not in pod(build(overlay))
    assert with_component(overlay, "host-ipc", tmp_path)["hostIPC"] is True


def test_openshift_may_choose_the_user_and_adds_nothing(overlay: Path, tmp_path: Path) -> None:
    """By restricted-v2: no user or group of our own, no added capability, nothing of the host."""
    assert_confined(with_component(overlay, "openshift", tmp_path))


@pytest.mark.parametrize("name", ["gaudi2", "gaudi3"])
def test_openshift_may_choose_the_user_of_the_job_that_warms_up(name: str, tmp_path: Path) -> None:
    resources = built_with(KUBERNETES / "overlays" / name, tmp_path, "shared-recipes", "openshift")
    assert_confined(pod(resources))
    assert_confined(only(resources, "Job")["spec"]["template"]["spec"])


def assert_confined(spec: dict[str, Any]) -> None:
    assert set(spec["securityContext"]) == {"runAsNonRoot", "fsGroupChangePolicy", "seccompProfile"}
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("name", ["gaudi2", "gaudi3"])
def test_a_job_fills_the_recipe_cache_once_for_all_pods(name: str, tmp_path: Path) -> None:
    """Job and pods have the same state and recipes, on a volume that the bridge knows to be shared."""
    overlay = KUBERNETES / "overlays" / name
    first, second = pod(build(overlay))["initContainers"][0], pod(build(overlay))["containers"][0]
    resources = built_with(overlay, tmp_path, "shared-recipes")
    spec, job = pod(resources), only(resources, "Job")["spec"]["template"]["spec"]
    (filling,), (waiting,), (server,) = job["containers"], spec["initContainers"], spec["containers"]
    # What an init container does without the component.
    assert filling["args"] == first["args"]
    for same in ("image", "envFrom", "securityContext", "resources"):
        assert filling[same] == first[same] == server[same]
    assert (waiting["args"], server["args"]) == (["check", "verify"], second["args"])
    assert filling["env"] == waiting["env"] == server["env"]
    values = {one["name"]: one["value"] for one in server["env"]}
    place, cleared, _, is_shared = values["PT_HPU_RECIPE_CACHE_CONFIG"].split(",")
    assert (cleared, is_shared) == ("false", "true")
    assert place.startswith(f"{values['STATE_DIR']}/")
    claim = only(resources, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for container, volumes in ((filling, job), (waiting, spec), (server, spec)):
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        volume = only_named(volumes["volumes"], mounts[values["STATE_DIR"]])
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mounts.keys() >= {one["mountPath"] for one in second["volumeMounts"]} - {"/var/lib/hpu-duo"}
    assert job["securityContext"] == spec["securityContext"]
    assert job["restartPolicy"] == "OnFailure"


def only_named(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (one,) = (one for one in found if one["name"] == name)
    return one


def test_calls_have_time_to_end_before_a_pod_or_service_is_killed(overlay: Path) -> None:
    text = (GAUDI / "lib" / "settings.sh").read_text(encoding="utf-8")
    drain = re.search(r"DRAIN_SECONDS=(\d+)", text)
    assert drain is not None
    assert pod(build(overlay))["terminationGracePeriodSeconds"] > int(drain[1])
    compose = yaml.safe_load((GAUDI / "compose.yaml").read_text(encoding="utf-8"))
    assert int(compose["services"]["server"]["stop_grace_period"].removesuffix("s")) > int(drain[1])
    unit = (GAUDI / "systemd" / "hpu-duo.service").read_text(encoding="utf-8")
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert stop is not None
    assert int(stop[1]) > int(drain[1])
