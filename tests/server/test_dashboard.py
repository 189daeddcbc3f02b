"""The dashboard asks for metrics that a server has, and for all of them that are worth a panel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import TinyChat
from tests.server.live import Live, live
from tests.server.promql import Expression

MONITORING = Path(__file__).parents[2] / "examples/monitoring"
DASHBOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]

FROM_PROMETHEUS = frozenset({"instance", "job"})
"""Labels that Prometheus adds."""

OMITTED = {
    "hpuduo:answer_bytes": "bounded for each call; an alert, not a curve",
    "hpuduo:lost_log_lines": "only servers that log calls lose lines; an alert, not a curve",
    "hpuduo:request_prefill_time_seconds": "time to first token less the queue, which both have panels",
    "hpuduo:request_inference_time_seconds": "end to end less the queue, which both have panels",
    **dict.fromkeys(("hpuduo:cache_config_info", "hpuduo:kv_token_bytes"), "constant while a server runs"),
    **dict.fromkeys(
        [f"hpuduo:replan_{name}" for name in ("captures", "capture_seconds", "padding_before", "padding")],
        "of servers with --replan only; the padding of all steps has a panel",
    ),
    **dict.fromkeys(
        [
            f"hpuduo:rank_{name}"
            for name in (
                "broadcasts",
                "broadcast_bytes",
                "reduced_bytes",
                "gathered_bytes",
                "scattered_bytes",
            )
        ],
        "of servers whose model several ranks share; follows from the steps by formula",
    ),
    "hpuduo:kv_clipped_values": "of models with constant scales only; an alert, not a curve",
    **dict.fromkeys(
        [f"hpuduo:external_prefix_cache_{name}" for name in ("queries", "hits")],
        "of servers with --kv-offloading-size only",
    ),
    **dict.fromkeys(
        [
            f"hpuduo:offload_{name}"
            for name in (
                "transfers",
                "used_bytes",
                "stored_bytes",
                "loaded_bytes",
                "stored_seconds",
                "loaded_seconds",
                "busy",
                "evicted",
                "declined",
                "abandoned",
                "swap_recomputed",
                "damaged",
                "swap_lost",
                "swap_damaged",
                "swapped_out",
                "swapped_in",
                "disk_used_bytes",
                "disk_hit_tokens",
                "disk_written_bytes",
                "disk_written_seconds",
                "disk_late",
                "disk_dropped",
                "disk_read_bytes",
                "disk_read_seconds",
                "disk_damaged",
                "disk_foreign",
                "disk_failures",
            )
        ],
        "of servers with --kv-offloading-size only",
    ),
    "process_virtual_memory_bytes": "says little beside the resident memory",
    "process_start_time_seconds": "a moment",
    "python_info": "a version",
}
"""Metrics without a panel, and why."""


def filled(text: str, namespace: str) -> str:
    """An expression as Grafana sends it."""
    values = {"${namespace}": namespace, "$model": ".*", "$instance": ".*", "$__rate_interval": "1m"}
    for name, value in values.items():
        text = text.replace(name, value)
    assert "$" not in text, f"expected only the dashboard's variables, got {text}"
    return text


@pytest.fixture(scope="module", params=["hpuduo", "vllm"])
def server(request: pytest.FixtureRequest, tiny: TinyChat) -> Iterator[Live]:
    """A server that has answered some calls."""
    with live(tiny.load(), metrics_namespace=request.param) as running:
        client = running.client()
        for stream in (False, True):
            made = client.completions.create(
                model="tiny", prompt="Once", n=2, max_tokens=5, stream=stream, extra_body={"ignore_eos": True}
            )
            list(made)
        yield running


def exposed(server: Live) -> dict[str, tuple[str, set[str]]]:
    """Families and labels by the names of samples."""
    with server.http() as http:
        families = list(text_string_to_metric_families(http.get("/metrics").text))
    found: dict[str, tuple[str, set[str]]] = {}
    for family in families:
        for sample in family.samples:
            _, labels = found.setdefault(sample.name, (family.name, set()))
            labels.update(sample.labels)
    return found


def test_every_panel_asks_for_what_there_is(server: Live) -> None:
    found = exposed(server)
    for title, text in TARGETS:
        expression = Expression.parse(filled(text, server.service.config.metrics_namespace))
        assert expression.selectors, f"{title} reads nothing"
        known: set[str] = set()
        for selector in expression.selectors:
            assert selector.name in found, f"{title} asks for {selector.name}, which no server has"
            _, labels = found[selector.name]
            known |= labels
            assert selector.labels <= labels | FROM_PROMETHEUS, f"{title}: {selector} has only {labels}"
        assert expression.groups <= known | FROM_PROMETHEUS, f"{title} groups by {expression.groups}"


def test_every_curve_has_something_to_show(server: Live) -> None:
    with server.http() as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
        counts = {one.name: one.value for family in families for one in family.samples}
    for title, text in TARGETS:
        for selector in Expression.parse(filled(text, server.service.config.metrics_namespace)).selectors:
            if selector.name.endswith(("_count", "_bucket", "_sum")):
                name = re.sub(r"_(bucket|sum)$", "_count", selector.name)
                assert counts[name] > 0, f"{title}: {name} has no observation"


def test_every_metric_is_on_the_dashboard_or_left_out_by_name(server: Live) -> None:
    found, namespace = exposed(server), server.service.config.metrics_namespace
    shown = {
        found[selector.name][0]
        for _, text in TARGETS
        for selector in Expression.parse(filled(text, namespace)).selectors
    }
    # The omissions are named once, with the prefix that all metrics have by default.
    families = {family.replace(f"{namespace}:", "hpuduo:") for family, _ in found.values()}
    shown = {family.replace(f"{namespace}:", "hpuduo:") for family in shown}
    assert families - shown == OMITTED.keys()


def test_panels_have_names_of_their_own_and_do_not_overlap() -> None:
    for key in ("id", "title"):
        values = [panel[key] for panel in DASHBOARD["panels"]]
        assert len(set(values)) == len(values)
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)
    for one, other in combinations((panel["gridPos"] for panel in DASHBOARD["panels"]), 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below, f"{one} and {other} overlap"
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in DASHBOARD["panels"])


def test_the_dashboard_is_bound_to_no_installation() -> None:
    def sources(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if "uid" in value.get("datasource", {}):
                yield value["datasource"]["uid"]
            for one in value.values():
                yield from sources(one)
        elif isinstance(value, list):
            for one in value:
                yield from sources(one)

    assert set(sources(DASHBOARD)) == {"${datasource}"}
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "namespace", "model", "instance"}


def test_the_scrape_configuration_asks_a_server_at_its_default_address(server: Live) -> None:
    from hpu_duo.cli.serving.options import ListeningOptions

    configuration = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    [job] = configuration["scrape_configs"]
    [targets] = job["static_configs"]
    options = ListeningOptions()
    assert targets["targets"] == [f"{options.host}:{options.port}"]
    with server.http() as http:
        assert http.get(job["metrics_path"]).status_code == 200


@pytest.mark.parametrize("text", ["sum(", "rate(x[)", "x{a=}"])
def test_what_is_no_promql_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Expression.parse(text)
