"""Default contexts of a capacity report, and the report as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpu_duo.cost import Capacity, ModelSize, Serving

DEFAULT_SPARSITIES = [0.0, 0.5, 0.75]
DEFAULT_KV_FORMATS = ["bf16", "fp8"]
DEFAULT_CONTEXTS = (8_192, 32_768, 131_072, 524_288)


def default_contexts(max_positions: int) -> list[int]:
    """Return those of ``DEFAULT_CONTEXTS`` that the model serves, or else its number of positions."""
    return [context for context in DEFAULT_CONTEXTS if context <= max_positions] or [max_positions]


def report_fields(model: ModelSize, serving: Serving, found: list[Capacity]) -> dict[str, Any]:
    """The report as JSON values: bytes, seconds, tokens per second."""
    from hpu_duo.cost import ERROR_FACTORS, FITTED, published_rows, split_rows
    from hpu_duo.cost.fit import median_error
    from hpu_duo.cost.warm_up import UNKNOWN

    hardware = asdict(serving.hardware)
    return {
        "model": {
            "name": model.name,
            "num_params": model.num_params,
            "weight_bytes": model.weight_bytes(serving.weights),
            "max_positions": model.max_positions,
        },
        "serving": {
            **asdict(replace(serving, pattern=None, kept=None)),
            "kept": None if serving.kept is None else serving.kept.name,
            "hardware": hardware,
            "weights": serving.weights.value,
            "pattern": None if serving.pattern is None else serving.pattern.source,
        },
        "kv_cache_bytes": serving.kv_budget_bytes(model),
        "capacities": [{**asdict(each), "kv_format": each.kv_format.value} for each in found],
        "not_served": list(serving.not_served),
        "efficiency": asdict(FITTED),
        "held_out_median_error": median_error(split_rows(published_rows())[1], FITTED),
        "published_figures": dict(Counter(row.format.value for row in published_rows())),
        "error_factors": {each.value: factor for each, factor in ERROR_FACTORS.items()},
        "warm_up_unknown": UNKNOWN,
        "is_measured_by_this_project": False,
    }
