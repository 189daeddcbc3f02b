"""Writes what Intel Neural Compressor writes for a Llama: a configuration, and measurements of each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
INPUTS = {"qkv_proj": 5.0, "o_proj": 3.0, "gate_up_proj": 4.0, "down_proj": 2.0, "lm_head": 6.0}
KEYS, VALUES = 20.0, 1.5
"""Largest inputs, keys and values; those of layer n are n + 1 times as large."""


def nodes_of(state: Mapping[str, torch.Tensor], num_layers: int) -> dict[str, Any]:
    """Measurements of the linear layers of a checkpoint, by the modules of vLLM."""
    nodes: dict[str, Any] = {}
    for name, weight in state.items():
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        leaf = FUSED.get(leaf, leaf)
        if leaf not in INPUTS:
            continue
        number = int(name.split(".")[2]) if ".layers." in name else 0
        node = nodes.setdefault(
            f"{parent}.{leaf}".strip("."),
            {"inputs": [[[INPUTS[leaf] * (number + 1)]]], "params": {"weight": [[0.0]]}},
        )
        largest = max(node["params"]["weight"][0][0], float(weight.abs().max()))
        node["params"]["weight"] = [[largest]]
    for number in range(num_layers):
        for cache, largest in (("k_cache", KEYS), ("v_cache", VALUES)):
            nodes[f"model.layers.{number}.self_attn.attn.impl.{cache}"] = {
                "inputs": [[[largest * (number + 1)]]],
                "outputs": [],
            }
    return nodes


def write_inc(
    directory: Path,
    ranks: Sequence[Mapping[str, Any]],
    *,
    kind: str = "DynamicRange",
    end: str = "",
    **fields: Any,
) -> Path:
    """Write the files of some ranks and the configuration, whose path is returned."""
    stats = directory / "g2"
    stats.mkdir(parents=True, exist_ok=True)
    for rank, nodes in enumerate(ranks):
        content = {"GlobalRank": None, "LocalRank": rank, "Mode": kind, "Nodes": nodes}
        name = f"inc_output_hooks_maxabs{end}_{rank}_{len(ranks)}"
        (stats / f"{name}.json").write_text(json.dumps(content))
        (stats / f"{name}_mod_list.json").write_text(json.dumps([]))
    config = {
        "mode": "QUANTIZE",
        "observer": "maxabs",
        "scale_method": "maxabs_hw",
        "allowlist": {"types": [], "names": []},
        "blocklist": {"types": [], "names": []},
        "dump_stats_path": str(stats / "inc_output"),
    }
    file = directory / "maxabs_quant_g2.json"
    file.write_text(json.dumps({**config, **fields}))
    return file
