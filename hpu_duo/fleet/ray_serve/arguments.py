"""Arguments of the application, from ``serve run`` or configurations of Ray Serve."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.config.limits import SchedulerConfig
from hpu_duo.config.overrides import LoadOverrides
from hpu_duo.fleet.routing import make_router
from hpu_duo.server.config import ServerConfig, read_api_keys

_RESOURCES = {"hpu": "HPU", "cuda": "GPU", "cpu": None, "hpu-sim": None}
"""Ray's names of the devices; of the last two every process has as many as it likes."""
_NAMED_ELSEWHERE = ("device", "device_map", "tensor_parallel_size")
_SET_HERE = ("model_names", "api_keys", "metrics_api_keys", "quiet_s")


@dataclass(frozen=True)
class EngineSettings:
    """Model and server of one replica.

    Attributes:
        path: of the model.
        engine: arguments of ``HPUDuoModel.from_pretrained``.
        server: settings of the application around it.
        warm_up: capture every bucket before calls are accepted.
    """

    path: str
    engine: dict[str, Any]
    server: ServerConfig
    warm_up: bool


@dataclass(frozen=True)
class IngressSettings:
    """Settings of the ingress.

    Attributes:
        server: limits of bodies and origins apply here; without keys.
        api_key_file: file on its node with the keys that callers must have one of; None = none are needed.
        metrics_api_key_file: the same for metrics and statistics.
        router: name of the router of its handle. It is here so that another one restarts the ingress, since
            Ray does not replace the request router of a handle that has one.
    """

    server: ServerConfig
    api_key_file: str | None
    metrics_api_key_file: str | None
    router: str

    @property
    def guarded(self) -> ServerConfig:
        """The settings of the server with the keys of the files.

        Raises:
            ValueError: a file cannot be read, or has none.
        """
        api_keys, metrics_api_keys = (
            () if file is None else read_api_keys(Path(file))
            for file in (self.api_key_file, self.metrics_api_key_file)
        )
        return replace(self.server, api_keys=api_keys, metrics_api_keys=metrics_api_keys)


class RayServeArgs(BaseModel):
    """Arguments of ``build_app``.

    Attributes:
        device: of every replica: hpu, cuda, cpu or hpu-sim. Ray has to know it before a replica starts.
        model: directory or hub id, the same on every node; None is the built-in model.
        served_model_name: names of the model in the API; by default the model's own.
        engine: further arguments of ``HPUDuoModel.from_pretrained``, such as ``sparsity``.
        server: fields of ``ServerConfig``, such as ``max_choices``; ``max_queue`` is that of one replica.
        api_key_file: file with a key in each line, on the node of the ingress; callers must have one.
        metrics_api_key_file: the same for those who read metrics and statistics.
        warm_up: capture every shape before calls are accepted.
        tensor_parallel_size: devices of each replica, all of one node.
        num_replicas: engines; not with ``autoscaling_config``.
        autoscaling_config: fields of Ray's ``AutoscalingConfig``; ``target_ongoing_requests`` is
            ``max_num_seqs`` by default.
        router: name with options, see ``hpu_duo.fleet.routing.make_router``.
        max_ongoing_requests: calls that a replica is sent at a time; twice ``max_num_seqs`` by default.
        max_queued_requests: further calls that wait in the ingress; with more, the status is 429.
        health_check_period_s, health_check_timeout_s: of Ray's health checks; after three that fail in a row
            another replica is started in place of this one.
        num_cpus: CPU cores that Ray sets aside for each replica.
        ingress_num_cpus: CPU cores that Ray sets aside for the ingress.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    device: Literal["hpu", "cuda", "cpu", "hpu-sim"]
    model: str | None = None
    served_model_name: str | list[str] = Field(default_factory=list)
    engine: dict[str, Any] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)
    api_key_file: str | None = None
    metrics_api_key_file: str | None = None
    warm_up: bool = True
    tensor_parallel_size: PositiveInt = 1
    num_replicas: PositiveInt | None = None
    autoscaling_config: dict[str, Any] | None = None
    router: str = "e2"
    max_ongoing_requests: PositiveInt | None = None
    max_queued_requests: PositiveInt = 2048
    health_check_period_s: PositiveFloat = 5.0
    health_check_timeout_s: PositiveFloat = 10.0
    num_cpus: float = Field(default=1.0, ge=0)
    ingress_num_cpus: float = Field(default=1.0, ge=0)

    @field_validator("router")
    @classmethod
    def _is_a_router(cls, value: str) -> str:
        make_router(value)
        return value

    @field_validator("engine")
    @classmethod
    def _are_engine_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        _refuse_unknown("engine", value, LoadOverrides.__annotations__.keys() - {*_NAMED_ELSEWHERE})
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> RayServeArgs:
        known = {each.name for each in fields(ServerConfig)} - {*_SET_HERE}
        _refuse_unknown("server", self.server, known)
        if self.autoscaling_config is not None and self.num_replicas is not None:
            raise ValueError("expected num_replicas or autoscaling_config, got both")
        self.server_config()
        return self

    @property
    def max_num_seqs(self) -> int:
        """Most requests that one replica runs at a time."""
        return int(self.engine.get("max_num_seqs", SchedulerConfig.max_num_seqs))

    def server_config(self) -> ServerConfig:
        """Settings of each server, without keys.

        Raises:
            ValueError: a value is out of range.
        """
        names = self.served_model_name
        names = [names] if isinstance(names, str) else names
        given: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in self.server.items()
        }
        return ServerConfig(model_names=tuple(names) or (self._own_name,), **given)

    @property
    def _own_name(self) -> str:
        from hpu_duo.modeling.hub import model_name

        if self.model is None:
            return "builtin"
        return model_name(Path(self.model)) if Path(self.model).exists() else self.model

    @property
    def ingress_settings(self) -> IngressSettings:
        """Settings of the ingress; nothing else restarts it when it changes."""
        return IngressSettings(
            self.server_config(), self.api_key_file, self.metrics_api_key_file, self.router
        )

    @property
    def engine_settings(self) -> EngineSettings:
        """Model and server of each replica."""
        engine = {
            "graphs": "auto",
            **self.engine,
            "device": self.device,
            "tensor_parallel_size": self.tensor_parallel_size,
        }
        is_cut = any(engine.get(name) is not None for name in ("sparsity", "threshold"))
        if self.model is None and is_cut and engine.get("pattern") is None:
            engine["pattern"] = str(PATTERN_DIR)
        path = str(MODEL_DIR) if self.model is None else self.model
        return EngineSettings(path, engine, self.server_config(), self.warm_up)

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options of the deployment of engines: replicas, and what Ray sets aside for each.

        Ranks are processes of their replica's machine. So their resources are one bundle of a placement
        group, on one node, and the replica sees all of its devices.
        """
        resource = _RESOURCES[self.device]
        devices = {} if resource is None else {resource: float(self.tensor_parallel_size)}
        actor: dict[str, Any] = {"num_cpus": self.num_cpus}
        if "GPU" in devices:
            actor["num_gpus"] = devices["GPU"]
        elif devices:
            actor["resources"] = devices
        options: dict[str, Any] = {
            "ray_actor_options": actor,
            "max_ongoing_requests": self.max_ongoing_requests or 2 * self.max_num_seqs,
            "max_queued_requests": self.max_queued_requests,
            "graceful_shutdown_timeout_s": self.server_config().drain_seconds,
            "health_check_period_s": self.health_check_period_s,
            "health_check_timeout_s": self.health_check_timeout_s,
        }
        if self.tensor_parallel_size > 1:
            options["placement_group_bundles"] = [{"CPU": self.num_cpus, **devices}]
            options["placement_group_strategy"] = "STRICT_PACK"
        if self.autoscaling_config is None:
            options["num_replicas"] = self.num_replicas or 1
        else:
            target = {"target_ongoing_requests": self.max_num_seqs}
            options["autoscaling_config"] = {**target, **self.autoscaling_config}
        return options


def _refuse_unknown(what: str, given: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(given.keys() - known):
        raise ValueError(
            f"expected {what} to have some of {', '.join(sorted(known))}; got {', '.join(unknown)}"
        )
