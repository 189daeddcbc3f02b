"""A model as the engine would build it for an HPU, without weights or memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from graphs import BatchShape, BucketTable, EagerBackend, StepLimits
from hpu_duo.config.engine import CacheConfig, EngineConfig, ModelConfig
from hpu_duo.config.limits import DeviceBudget
from hpu_duo.device import resolve_device
from hpu_duo.device.placing import replace_tensors
from hpu_duo.engine.batch import StepGeometry
from hpu_duo.engine.step_input import message_fields
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.lab.audit.fake_tensors import FakeTensorMode
from hpu_duo.lab.audit.reach import check_reach
from hpu_duo.modeling.attention import LiveRows
from hpu_duo.modeling.experts import adapt_loops
from hpu_duo.modeling.hpu_forms import use_hpu_forms
from hpu_duo.modeling.loading import build_without_weights, read_config, resolve_dtype
from hpu_duo.modeling.probe import read_layers
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.planning import Hardware
from hpu_duo.planning.read_model import CONFIG_FILE, stored_bytes
from hpu_duo.startup.blueprint import Blueprint, ChosenKernels, fix_served_len, request_len
from hpu_duo.startup.head_choice import check_pattern
from hpu_duo.startup.tables import StepTables
from kernels_ref import FusedOperators, Implementation, Softmax
from kernels_ref.hpu.attention import LINE_BYTES

HPU = torch.device("hpu", 0)


@dataclass(frozen=True)
class Structure:
    """All that a step's operators depend on.

    Attributes:
        name: of the model's directory.
        mode: the fake tensor mode of all its tensors.
        model: the step model, its parameters and stores on a fake ``hpu:0``.
        geometry, limits, memory, tables: as the engine has them.
        vocab_size, max_len: of the model, and of a request in tokens.
        stored_bytes: of all weights, if the checkpoint's are quantised.
    """

    name: str
    mode: FakeTensorMode
    model: StepModel
    geometry: StepGeometry
    limits: StepLimits
    memory: MemoryPlan
    tables: StepTables
    vocab_size: int
    max_len: int
    stored_bytes: int | None = None

    @cached_property
    def table(self) -> BucketTable:
        """The bucket table, planned at first use: that takes seconds, and tracing one bucket does without."""
        table = self.tables.table(self.memory)
        check_reach(table, self.limits)
        return table

    @property
    def held(self) -> list[torch.Tensor]:
        """Tensors that outlive a step: parameters, buffers and stores."""
        return [*self.model.model.parameters(), *self.model.model.buffers()]

    @property
    def stores(self) -> list[torch.Tensor]:
        """The stores of all layers, without their scratch."""
        return self.model.stores_flat

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters, or of a quantised checkpoint's weights as they are stored."""
        if self.stored_bytes is not None:
            return self.stored_bytes
        return sum(parameter.nbytes for parameter in set(self.model.model.parameters()))

    def inputs(self, bucket: BatchShape) -> dict[str, torch.Tensor]:
        """The staged inputs of a bucket, int32, without data; to be called inside ``mode``."""
        shapes = message_fields(self.geometry, bucket)
        return {name: torch.empty(shape, dtype=torch.int32, device=HPU) for name, shape in shapes.items()}


def build_structure(config: EngineConfig, hardware: Hardware) -> Structure:
    """Build a model from its ``config.json``; no weights are read and no memory is taken.

    Args:
        config: as for the engine; ``model.device`` and ``graph.backend`` have no effect. The kernels are the
            reference ones, which any HPU would run, or with ``model.attention="hpu"`` those on fused
            operators, all of which are taken to be there; norms and rotary embeddings stay the model's own.
        hardware: what the KV cache has to fit on where ``config.cache`` does not say how large it is:
            what ``config.cache.device_memory_utilization`` of it leaves beside weights, less a tenth of that
            for graphs.

    Raises:
        ValueError: what the engine refuses; there are no fake tensors of device ``hpu`` here; or buckets
            that the stores cannot serve.
    """
    make_hpu_known()
    path = Path(config.model.path)
    hf_config = read_config(path, needs_weights=False)
    dtype = resolve_dtype(config.model.dtype, hf_config, HPU.type)
    request_len(config, hf_config.get_text_config())  # refused before it is built
    check_pattern(config.heads, path)
    model = build_without_weights(path, hf_config, dtype)
    adapt_loops(model)
    use_hpu_forms(model)
    fix_served_len(model, config)
    mode, live = FakeTensorMode(), LiveRows()
    with mode:
        # transformers before 5 switches autocast off for the device, and torch has none for ``meta``.
        replace_tensors(model, _on_hpu)
        layers = read_layers(model)
        kernels = _kernels(config.model, hardware)
        blueprint = Blueprint.draw(model, layers, config, HPU, kernels, memory_bytes=hardware.memory_bytes)
    stored = stored_bytes(path / CONFIG_FILE)
    cache, budget = _cache(config.cache, model, hardware, stored)
    memory = blueprint.memory(budget, cache)
    tables = blueprint.tables(EagerBackend(), is_padding=True)
    limits = tables.limits(memory)
    with mode:
        _, step_model = blueprint.build(model, memory, live)
    structure = Structure(
        name=path.resolve().name,
        mode=mode,
        model=step_model,
        geometry=tables.geometry(memory),
        limits=limits,
        memory=memory,
        tables=tables,
        vocab_size=blueprint.text_config.vocab_size,
        max_len=limits.max_model_len,
        stored_bytes=stored,
    )
    if config.graph.table is not None:
        _ = structure.table  # check a given table now
    return structure


def make_hpu_known() -> None:
    """Let torch make fake tensors of device ``hpu``: by habana_frameworks, or else by the simulated HPU.

    Raises:
        ValueError: there is neither.
    """
    if not hasattr(torch, "hpu"):
        resolve_device("hpu-sim")


def _kernels(model: ModelConfig, hardware: Hardware) -> ChosenKernels:
    softmax = Softmax(model.softmax)
    if model.attention in ("auto", Implementation.REFERENCE.value):
        return ChosenKernels(Implementation.REFERENCE, softmax)
    if model.attention != Implementation.HPU.value:
        raise ValueError(f"expected attention that an HPU runs, reference or hpu, got {model.attention!r}")
    line_bytes = LINE_BYTES if hardware.name.endswith("3") else 0
    operators = FusedOperators(True, True, True, line_bytes, row_attention=True)
    return ChosenKernels(Implementation.HPU, softmax, operators)


def _cache(
    cache: CacheConfig, model: PreTrainedModel, hardware: Hardware, stored: int | None
) -> tuple[CacheConfig, DeviceBudget]:
    total, utilization = hardware.memory_bytes, cache.device_memory_utilization
    if cache.num_blocks is not None or cache.kv_cache_bytes is not None:
        # A size that was named is taken, weights or no weights, if the device is as large.
        return cache, DeviceBudget.of_own_device(total, 0, utilization)
    weight_bytes = stored or sum(parameter.nbytes for parameter in set(model.parameters()))
    if weight_bytes >= total:
        raise ValueError(
            f"the weights take {weight_bytes} bytes, and {hardware.title} has {hardware.memory_bytes}: "
            "expected num_blocks or kv_cache_bytes to audit the model nevertheless"
        )
    budget = DeviceBudget.of_own_device(total, weight_bytes, utilization)
    return replace(cache, kv_cache_bytes=max(1, budget.kv_bytes(budget.graph_bytes()))), budget


def _on_hpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor on ``hpu:0`` in place of one on ``meta``."""
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=HPU)
