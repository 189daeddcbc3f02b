"""Arguments of the application for Ray Serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.config.limits import SchedulerConfig
from hpu_duo.fleet.ray_serve.arguments import RayServeArgs


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "device"),
        ({"device": "tpu"}, "device"),
        ({"device": "cpu", "replicas": 2}, "replicas"),
        ({"device": "cpu", "router": "e3"}, "e3"),
        ({"device": "cpu", "router": "e2:window=3"}, "window"),
        ({"device": "cpu", "engine": {"max_seqs": 3}}, "max_seqs"),
        ({"device": "cpu", "engine": {"device": "hpu"}}, "device"),
        ({"device": "cpu", "server": {"api_keys": ["k"]}}, "api_keys"),
        ({"device": "cpu", "server": {"max_choices": 0}}, "max_choices"),
        ({"device": "cpu", "num_replicas": 0}, "num_replicas"),
        ({"device": "cpu", "num_replicas": 2, "autoscaling_config": {}}, "got both"),
        ({"device": "cpu", "num_cpus": -1}, "num_cpus"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        RayServeArgs.model_validate(arguments)


def test_arguments_of_a_command_line_are_words() -> None:
    args = RayServeArgs.model_validate({"device": "cpu", "num_replicas": "2", "warm_up": "false"})
    assert (args.num_replicas, args.warm_up) == (2, False)


def test_without_a_model_it_is_the_built_in_one_with_its_own_pattern() -> None:
    settings = RayServeArgs(device="cpu", engine={"sparsity": 0.5}).engine_settings
    assert (settings.path, settings.engine["pattern"]) == (str(MODEL_DIR), str(PATTERN_DIR))
    assert settings.server.model_names == ("builtin",)
    assert "pattern" not in RayServeArgs(device="cpu").engine_settings.engine
    named = RayServeArgs(device="cpu", model="/no/such/model", served_model_name=["one", "two"])
    assert (named.engine_settings.path, named.server_config().model_names) == (
        "/no/such/model",
        ("one", "two"),
    )


def test_a_replica_on_hpus_has_all_of_them_in_one_bundle() -> None:
    args = RayServeArgs(device="hpu", tensor_parallel_size=4, num_cpus=16, num_replicas=2)
    assert args.engine_settings.engine["tensor_parallel_size"] == 4
    options = args.engine_options
    assert options["placement_group_bundles"] == [{"CPU": 16.0, "HPU": 4.0}]
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert options["ray_actor_options"] == {"num_cpus": 16.0, "resources": {"HPU": 4.0}}
    assert options["num_replicas"] == 2


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        ("hpu", {"num_cpus": 1.0, "resources": {"HPU": 1.0}}),
        ("cuda", {"num_cpus": 1.0, "num_gpus": 1.0}),
        ("cpu", {"num_cpus": 1.0}),
        ("hpu-sim", {"num_cpus": 1.0}),
    ],
)
def test_a_replica_asks_ray_for_its_device(device: str, wanted: dict[str, Any]) -> None:
    options = RayServeArgs.model_validate({"device": device}).engine_options
    assert options["ray_actor_options"] == wanted
    assert "placement_group_bundles" not in options


def test_replicas_are_added_when_more_wait_than_one_can_run() -> None:
    args = RayServeArgs(device="cpu", engine={"max_num_seqs": 12}, autoscaling_config={"max_replicas": 8})
    options = args.engine_options
    assert options["autoscaling_config"] == {"target_ongoing_requests": 12, "max_replicas": 8}
    assert options["max_ongoing_requests"] == 24
    assert "num_replicas" not in options
    own = RayServeArgs(device="cpu", autoscaling_config={"target_ongoing_requests": 3}).engine_options
    assert own["autoscaling_config"] == {"target_ongoing_requests": 3}
    assert own["max_ongoing_requests"] == 2 * SchedulerConfig.max_num_seqs


def test_replicas_have_no_keys_and_the_ingress_reads_them_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# comment\none\n\n two \n")
    args = RayServeArgs(
        device="cpu",
        api_key_file=str(file),
        metrics_api_key_file=str(file),
        server={"allowed_origins": ["*"]},
    )
    assert args.engine_settings.server.api_keys == args.engine_settings.server.metrics_api_keys == ()
    config = args.ingress_settings.guarded
    assert (config.api_keys, config.allowed_origins) == (("one", "two"), ("*",))
    assert config.metrics_api_keys == ("one", "two")
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="found none"):
        _ = args.ingress_settings.guarded
