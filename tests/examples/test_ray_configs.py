"""Configurations for Ray Serve: arguments that the application takes, and fields that Ray knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hpu_duo.fleet.ray_serve.arguments import RayServeArgs

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = [EXAMPLES / "ray" / "serve.yaml", *sorted((EXAMPLES / "gaudi" / "ray").glob("*.yaml"))]


def read(path: Path) -> dict[str, Any]:
    """The configuration of a file."""
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def arguments(path: Path) -> RayServeArgs:
    """Arguments of the only application of a file."""
    (application,) = read(path)["applications"]
    assert application["import_path"] == "hpu_duo.fleet.ray_serve.app:build_app"
    return RayServeArgs.model_validate(application["args"])


def test_there_is_one_for_this_machine_and_two_for_eight_cards() -> None:
    assert [path.name for path in CONFIGS] == [
        "serve.yaml",
        "eight-replicas.yaml",
        "two-replicas-of-four.yaml",
    ]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_application_takes_the_arguments(path: Path) -> None:
    assert arguments(path).engine_options["max_ongoing_requests"] >= arguments(path).max_num_seqs


@pytest.mark.parametrize("path", CONFIGS[1:], ids=lambda path: path.stem)
def test_eight_cards_are_taken_and_no_more(path: Path) -> None:
    args = arguments(path)
    most = args.num_replicas if args.autoscaling_config is None else args.autoscaling_config["max_replicas"]
    assert most is not None
    assert most * args.tensor_parallel_size == 8
    assert args.api_key_file is not None


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_ray_knows_every_field(path: Path) -> None:
    pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install -e '.[ray]'")
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(read(path))
