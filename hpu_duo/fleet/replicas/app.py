"""The application of the front process, and its metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from hpu_duo import __version__
from hpu_duo.fleet.replicas.front import Front
from hpu_duo.fleet.replicas.relaying import FrontCounts
from hpu_duo.fleet.replicas.replica import ReplicaState
from hpu_duo.server.http.middleware import add_guards, install_error_handlers
from hpu_duo.server.http.routes import probe_routes

_LABEL, _FRONT = "replica", "front"
_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class RoutedReplica:
    """A replica that calls are sent to.

    Attributes:
        name: of the replica.
        num_open: calls that it was sent and has not answered.
        load: in the router's own measure.
    """

    name: str
    num_open: int
    load: float


async def exposition(front: Front) -> bytes:
    """The metrics of all, in Prometheus' text format, without replicas that do not respond in time."""
    known, router = front.replicas, front.router
    ready = [name for name, each in known.items() if each.state is ReplicaState.READY]
    answers = await asyncio.gather(
        *(front.upstream.text(f"{front.url(name)}/metrics", _TIMEOUT_S) for name in ready)
    )
    texts = {name: found[1].decode() for name, found in zip(ready, answers) if found and found[0] == 200}
    now = front.now()
    routed = [RoutedReplica(n, router.num_open(n), router.load(n, now)) for n in router.replicas]
    restarts = {name: each.num_restarts for name, each in known.items()}
    return text_of(texts, front.counts, routed, restarts)


def text_of(
    texts: Mapping[str, str],
    counts: FrontCounts,
    routed: Sequence[RoutedReplica],
    restarts: Mapping[str, int] | None = None,
) -> bytes:
    """Metrics of replicas and of the router before them, in Prometheus' text format.

    Args:
        texts: what each replica exposes.
        counts: of calls.
        routed: replicas that are up.
        restarts: of every replica; None if they are started elsewhere.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Everything(texts, counts, routed, restarts))
    return generate_latest(registry)


def labelled(texts: Mapping[str, str]) -> dict[str, Metric]:
    """The metrics of replicas by name, with the replica as a label.

    Args:
        texts: what each replica exposes.
    """
    found: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            known = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [
                each._replace(labels={**each.labels, _LABEL: replica}) for each in family.samples
            ]
    return found


class _Everything(Collector):
    def __init__(
        self,
        texts: Mapping[str, str],
        counts: FrontCounts,
        routed: Sequence[RoutedReplica],
        restarts: Mapping[str, int] | None,
    ) -> None:
        self._texts, self._counts, self._routed, self._restarts = texts, counts, routed, restarts

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, for Prometheus' client."""
        found = labelled(self._texts)
        requests = found.setdefault(
            "http_requests", Metric("http_requests", "Responses by method, path and status.", "counter")
        )
        for (method, path, status), num in sorted(self._counts.responses.items()):
            labels = {"method": method, "handler": path, "status": status, _LABEL: _FRONT}
            requests.add_sample("http_requests_total", labels, num)
        yield from found.values()
        yield from self._own()

    def _own(self) -> Iterator[Metric]:
        counts, routed, restarts = self._counts, self._routed, self._restarts
        names = [each.name for each in routed]
        known = names if restarts is None else restarts
        yield _gauge("replica_up", "1 while a replica is sent calls.", ((n, n in names) for n in known))
        if restarts is not None:
            yield _counter("replica_restarts", "Times that a replica was started again.", restarts.items())
        yield _gauge(
            "router_open_requests",
            "Calls that a replica was sent and has not answered.",
            ((each.name, each.num_open) for each in routed),
        )
        yield _gauge(
            "router_load",
            "Load of a replica in the router's own measure.",
            ((each.name, each.load) for each in routed),
        )
        yield _counter("router_requests", "Calls sent to a replica.", counts.requests.items())
        yield _counter("router_prompt_tokens", "Prompt tokens sent, if known.", counts.prompt_tokens.items())
        yield _counter(
            "router_expected_hit_tokens",
            "Prompt tokens that the router expected to be cached.",
            counts.expected_tokens.items(),
        )
        yield _counter(
            "router_hit_tokens",
            "Cached prompt tokens, of responses with usage.",
            counts.cached_tokens.items(),
        )
        for name, text, value in (
            ("router_retries", "Calls that were sent to another replica.", counts.num_retries),
            ("router_broken_answers", "Responses of lost replicas.", counts.num_broken),
        ):
            yield CounterMetricFamily(f"hpuduo:{name}", text, value=value)


def _gauge(name: str, text: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(f"hpuduo:{name}", text, labels=[_LABEL])
    for replica, value in values:
        family.add_metric([replica], float(value))
    return family


def _counter(name: str, text: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = CounterMetricFamily(f"hpuduo:{name}", text, labels=[_LABEL])
    for replica, value in values:
        family.add_metric([replica], float(value))
    return family


_STATS_S = 2.0


def create_front_app(front: Front) -> FastAPI:
    """An ASGI application that serves with a front, which starts and stops with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await front.start()
        yield
        await front.stop()

    app = FastAPI(
        title="HPU-Duo",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    install_error_handlers(app)
    app.include_router(_routes(front))
    add_guards(app, front.config.server, front.counts.responded)
    return app


def _routes(front: Front) -> APIRouter:
    router = APIRouter()

    async def stats() -> dict[str, Any]:
        """The statistics of each replica, and of the router."""
        return await statistics(front)

    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(await exposition(front), media_type=CONTENT_TYPE_LATEST)

    async def passed_on(request: Request) -> Response:
        """Everything else."""
        return await front.answer(request)

    router.include_router(probe_routes(lambda: front.stage))
    router.add_api_route("/stats", stats, methods=["GET"])
    router.add_api_route("/metrics", metrics, methods=["GET"])
    router.add_api_route("/{path:path}", passed_on, methods=["GET", "HEAD", "POST"])
    return router


async def statistics(front: Front) -> dict[str, Any]:
    """The fields of the first ready replica, those that add up for all, and each replica's own."""
    ready = [name for name, each in front.replicas.items() if each.state is ReplicaState.READY]
    answers = await asyncio.gather(*(front.upstream.text(f"{front.url(n)}/stats", _STATS_S) for n in ready))
    own = {name: json.loads(found[1]) for name, found in zip(ready, answers) if found and found[0] == 200}
    fields: dict[str, Any] = dict(next(iter(own.values()), {}))
    for name in ("num_open", "max_open"):
        fields[name] = sum(each.get(name, 0) for each in own.values())
    return {
        **fields,
        "stage": front.stage.value,
        "router": front.router.name,
        "num_ready": front.num_ready,
        "replicas": [
            {
                "name": name,
                "state": each.state.value,
                "pid": each.pid,
                "num_restarts": each.num_restarts,
                "stats": own.get(name),
            }
            for name, each in front.replicas.items()
        ],
    }
