"""Sizes of a model, and rates of a machine, in the terms of offloading."""

from __future__ import annotations

import math
from statistics import fmean

from hpu_duo.planning.model import AttentionSize, Format, Hardware, ModelSize
from hpu_duo.planning.offload.formula import OffloadMachine, OffloadModel
from hpu_duo.planning.roofline import FITTED
from kernels_ref import KVFormat


def offload_model(model: ModelSize, weights: Format, kv_format: KVFormat) -> OffloadModel:
    """Return the mean layer of a model.

    The embedding table, the output head and norms stay on the device, in bf16.

    Raises:
        ValueError: it has layers with a state instead of keys and values.
    """
    if any(model.states):
        raise ValueError(f"expected a model whose layers all have keys and values, {model.name} has states")
    num_layers = len(model.layers)
    first = model.layers[0]
    stored = model.matrix_params + model.experts.num_params
    resident = (model.head_params + model.other_params) * Format.BF16.num_bytes
    used = (model.matrix_params + model.experts.num_params * model.experts.share_per_token) / num_layers
    attention = (first.num_heads + first.num_kv_heads) * (first.head_dim + first.value_dim)
    between = max(1, round(used / model.hidden_size - attention) // 2)
    return OffloadModel(
        num_layers=num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=between,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        layer_params=round(used),
        layer_bytes=(stored * weights.num_bytes + model.matrix_outputs * weights.bytes_per_output)
        / num_layers,
        kv_bytes=fmean(_kv_bytes(layer, kv_format) for layer in model.layers),
        resident_bytes=resident,
        vocab_size=model.vocab_size,
    )


def _kv_bytes(layer: AttentionSize, kv_format: KVFormat) -> float:
    """Bytes of a token's keys and values, in bf16 or a format."""
    if layer.source is not None:
        return 0.0
    if layer.latent is not None:
        return Format.BF16.num_bytes * sum(layer.latent)
    token_bytes = kv_format.token_bytes(layer.head_dim, layer.value_dim, int(Format.BF16.num_bytes))
    return layer.num_kv_heads * token_bytes


def on_hardware(
    hardware: Hardware,
    weights: Format,
    *,
    host_memory: float,
    disk: float,
    link: float,
    disk_read: float,
    disk_write: float,
    host_attention: float,
    device_memory: float | None = None,
) -> OffloadMachine:
    """Return the machine of one accelerator, by the rates that the cost model predicts it to reach.

    Args:
        host_memory, disk: bytes that may be used.
        link: bytes a second of each direction between host and device.
        disk_read, disk_write: bytes a second.
        host_attention: operations a second of attention on the host.
        device_memory: bytes that may be used; None = all that start-up logs show as usable.
    """
    roof = hardware.reached_fp8 if weights.arithmetic is Format.FP8 else hardware.reached_bf16
    matrix = FITTED.compute * roof
    return OffloadMachine(
        device_memory=hardware.memory_bytes if device_memory is None else device_memory,
        host_memory=host_memory,
        disk=disk,
        up=link,
        down=link,
        down_kv=link,
        disk_read=disk_read,
        disk_read_weights=disk_read,
        disk_write=disk_write,
        disk_write_kv=disk_write,
        prefill_matrix=matrix,
        prefill_attention=matrix,
        decode_matrix=matrix,
        decode_attention=math.inf,
        host_attention=host_attention,
        memory_rate=FITTED.memory * hardware.memory_bytes_per_s,
    )
