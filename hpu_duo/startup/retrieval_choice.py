"""Choice of what ranks share of retrieval heads, where the user leaves it to the cost model."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from graphs import BatchShape, Phase
from hpu_duo.config import EngineConfig
from hpu_duo.cost import (
    FITTED,
    GAUDI2,
    GAUDI3,
    EngineWork,
    Hardware,
    ModelSize,
    Serving,
    kernels_of,
    predict_seconds,
)
from hpu_duo.cost.hardware import Format
from hpu_duo.cost.read_model import read_model
from hpu_duo.cost.work import Formats
from hpu_duo.device import resolve_device
from hpu_duo.kv.plan import LayerKV, MemoryPlan
from hpu_duo.kv_policies import make_kv_policy
from hpu_duo.modeling.loading import build_without_weights, read_config
from hpu_duo.modeling.probe import DecoderLayer, read_layers
from hpu_duo.startup.heads import choose_heads
from hpu_duo.startup.kv_plan import read_kv_plan
from hpu_duo.startup.rotary import request_len

_log = logging.getLogger(__name__)


def settled(config: EngineConfig) -> EngineConfig:
    """Return a configuration whose ``retrieval_parallel`` is no longer "auto"; others as they are.

    Raises:
        ValueError: the checkpoint's configuration cannot be read, or the head pattern does not fit it.
    """
    parallel = config.parallel
    if parallel.retrieval_parallel != "auto":
        return config
    chosen = "heads" if parallel.tensor_parallel_size == 1 else _faster(config)
    return _with(config, chosen)


def captures_exchanges(config: EngineConfig) -> bool:
    """Whether the capture backend takes layers whose blocks are dealt over ranks.

    Torch's compiler for CPUs writes its outer code in C++, which has no form for gathers.
    """
    backend = config.graph.backend
    name = backend if isinstance(backend, str) else backend.name
    return name != "compile" or resolve_device(config.model.device).type != "cpu"


def _with(config: EngineConfig, chosen: str) -> EngineConfig:
    parallel = replace(config.parallel, retrieval_parallel=chosen, retrieval_parallel_context=None)
    return replace(config, parallel=parallel)


def _faster(config: EngineConfig) -> str:
    """The choice with which decodes are predicted to be faster, on a Gaudi."""
    path, num_ranks = config.model.path, config.parallel.tensor_parallel_size
    hf_config = read_config(path, needs_weights=False)
    layers = read_layers(build_without_weights(path, hf_config, torch.float32))
    is_uneven = any(layer.call.num_kv_heads % num_ranks for layer in layers)
    if is_uneven or not captures_exchanges(config) or _pools_heads(config):
        return "heads"
    max_len = request_len(config, hf_config.get_text_config())
    context = min(config.parallel.retrieval_parallel_context or max_len, max_len)
    size, hardware = read_model(path), _hardware(config)
    by_choice = {
        each: _Choice(_with(config, each), layers, max_len, size, hardware) for each in ("heads", "context")
    }
    num_requests = by_choice["heads"].count_requests(context)
    seconds = {each: choice.decode_s(num_requests, context) for each, choice in by_choice.items()}
    best = min(seconds, key=seconds.__getitem__)
    _log.info(
        "retrieval_parallel=%s: decodes of %d request(s) of %d tokens are predicted to take %.1f ms by heads "
        "and %.1f ms by context, by the cost model of %s, which nobody has measured",
        *(best, num_requests, context, 1e3 * seconds["heads"], 1e3 * seconds["context"], hardware.title),
    )
    return best


def _pools_heads(config: EngineConfig) -> bool:
    """Whether a policy averages over the heads of a layer, which ranks do by heads only."""
    plan = read_kv_plan(config)
    keeps = [] if plan is None else [keep.what for heads in plan.layers for keep in heads if keep.has_policy]
    names = keeps if config.cache.kv_policy is None else [config.cache.kv_policy]
    return any(make_kv_policy(name).pools_heads for name in dict.fromkeys(names))


def _hardware(config: EngineConfig) -> Hardware:
    """The Gaudi that steps run on; on other devices a Gaudi 3, which is as good a guess as any."""
    device = str(config.model.device).partition(":")[0]
    if device != "hpu":
        return GAUDI3
    return GAUDI2 if str(torch.get_device_module("hpu").get_device_name()).endswith("2") else GAUDI3


class _Choice:
    """Heads, memory and steps of one choice."""

    def __init__(
        self,
        config: EngineConfig,
        layers: tuple[DecoderLayer, ...],
        max_len: int,
        size: ModelSize,
        hardware: Hardware,
    ) -> None:
        self._config, self._size, self._hardware = config, size, hardware
        device = torch.device("hpu" if str(config.model.device).startswith("hpu") else "cpu")
        chosen = choose_heads(config, layers, max_len, device)
        self._kv = tuple(
            LayerKV(each.groups, layer.call.head_dim) for layer, each in zip(layers, chosen.heads)
        )

    def count_requests(self, context: int) -> int:
        """Return how many requests run at once: 1 or more, and as many as fit on the devices."""
        most, num_devices = self._config.scheduler.max_num_seqs, self._config.parallel.tensor_parallel_size
        plan = MemoryPlan(self._kv, Format.BF16.num_bytes, self._config.block_size, 1, 1)
        try:
            budget = Serving(self._hardware, num_devices).kv_budget_bytes(self._size)
        except ValueError:
            return 1
        return max(1, min(most, budget // max(1, plan.bytes_per_request(context))))

    def decode_s(self, num_requests: int, context: int) -> float:
        """Return the predicted seconds of a decode of so many requests."""
        parallel, scheduler = self._config.parallel, self._config.scheduler
        work = EngineWork(
            self._size,
            self._kv,
            Formats(),
            kernels_of("hpu"),
            self._config.cache.block_size,
            scheduler.max_chunk_rows,
            num_devices=parallel.tensor_parallel_size,
            deals_blocks=parallel.deals_blocks,
        )
        num_blocks = num_requests * (context // self._config.block_size)
        bucket = BatchShape(Phase(unique=True), num_requests, 0, num_blocks, num_requests)
        found = work.of(bucket).fused
        return predict_seconds(found, self._hardware, parallel.tensor_parallel_size, FITTED).total
