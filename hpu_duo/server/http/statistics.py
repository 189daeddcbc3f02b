"""The body of ``/stats``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hpu_duo import __version__
from hpu_duo.server.service import Service


def statistics(service: Service) -> dict[str, Any]:
    """Return the engine's statistics, its resolved settings and limits, and the state of the server.

    It says nothing about single calls, because the route asks for no API key.
    """
    found = asdict(service.engine.stats)
    limits = found["resolved"].pop("limits")
    resolved = {**found.pop("resolved"), **limits}
    return {**found, "resolved": resolved, **_of_server(service), "kv": _kv_sizes(service)}


def _of_server(service: Service) -> dict[str, Any]:
    served, progress = service.served, service.warm_up_progress
    return {
        "model": served.names[0],
        "version": __version__,
        "stage": service.stage.value,
        "warm_up": None if progress is None else {"captured": progress[0], "total": progress[1]},
        "num_open": service.engine.num_open,
        "max_open": service.admission.max_open,
        "answer_bytes": service.engine.memory.num_bytes,
        "max_answer_memory_bytes": service.engine.memory.max_bytes,
        "num_recompilations": service.num_recompiles,
        "has_chat_template": served.encoder is not None and served.encoder.template.source is not None,
        "asks_for_key": bool(service.config.api_keys),
    }


def _kv_sizes(service: Service) -> dict[str, int]:
    """Bytes that tell what a request of any length leases, and what it would take in full attention."""
    memory = service.memory
    row_bytes = memory.bytes_per_request(0)
    return {
        "block_size": memory.block_size,
        "block_bytes": memory.bytes_per_request(1) - row_bytes,
        "row_bytes": row_bytes,
        "full_attention_token_bytes": memory.full_attention_bytes(1),
    }
