"""A model that drafts for another one: its checkpoint, its vocabulary, its stores beside the other's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hpu_duo.config.engine import EngineConfig, HeadConfig, ParallelConfig
from hpu_duo.config.limits import DeviceBudget
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.kv.store import KVStore
from hpu_duo.modeling.attention import LiveRows
from hpu_duo.modeling.hub import find_checkpoint
from hpu_duo.modeling.loading import load_model, load_tokenizer, read_config
from hpu_duo.modeling.precision import Precision
from hpu_duo.modeling.probe import DecoderLayer, probe
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.startup.blueprint import Blueprint, choose_kernels, fix_served_len
from kernels_ref import Blocks, Softmax


@dataclass(frozen=True)
class DraftModel:
    """A model in memory that drafts for another one.

    Attributes:
        model, layers: as probed.
        config: of an engine of this model.
        blueprint: of its stores.
    """

    model: PreTrainedModel
    layers: tuple[DecoderLayer, ...]
    config: EngineConfig
    blueprint: Blueprint

    @classmethod
    def load(
        cls, config: EngineConfig, served: Blueprint, vocab_size: int, precision: Precision, place: Any
    ) -> DraftModel:
        """Read the model that ``speculative_config`` names, all of it on each rank.

        Args:
            served: of the model that it drafts for.
            vocab_size: of that model.
            place: see ``device_side.Place``.

        Raises:
            ValueError: it cannot be read or served, has another vocabulary, or heads that do not store all
                tokens, or the model that it drafts for has no such heads.
        """
        speculation = config.scheduler.speculation
        assert speculation is not None, "a model drafts"
        assert speculation.model is not None, "checked by the configuration"
        path = find_checkpoint(speculation.model)
        hf_config = read_config(path)
        check_vocabulary(config.model.path, vocab_size, path, hf_config.get_text_config().vocab_size)
        config = replace(
            config,
            model=replace(config.model, path=path, quantization="auto"),
            heads=HeadConfig(),
            parallel=ParallelConfig(),
            # Scales and numbers of layers are those of the served model.
            cache=replace(config.cache, kv_scales=None, kv_cache_dtype_skip_layers=()),
            scheduler=replace(config.scheduler, max_model_len=served.max_len),
        )
        model = load_model(path, hf_config, precision.weights, place.first_device)
        try:
            fix_served_len(model, config)
        except ValueError as error:
            raise ValueError(f"speculative_config: model {speculation.model}: {error}") from error
        layers = probe(model)
        softmax, device = Softmax(config.model.softmax), place.device
        kernels = choose_kernels(config.model.attention, device, layers, precision.arithmetic, softmax)
        memory_bytes = place.runtime.total_bytes()
        blueprint = Blueprint.draw(
            model, layers, config, device, kernels, memory_bytes=memory_bytes, precision=precision
        )
        kinds = {group.kind for spec in blueprint.specs for group in spec.groups}
        others = sorted({kind.describe() or kind.name for kind in kinds if kind != Blocks()})
        states = {kind.name for spec in blueprint.specs for kind in spec.rows}
        others += sorted(states | {kind.name for each in blueprint.recurrent for kind in each.kinds})
        if others:
            raise ValueError(
                f"speculative_config: expected a model {speculation.model} whose heads store all tokens, "
                f"got {', '.join(others)}"
            )
        if served.memory_of(1, 0).block_bytes == 0:
            raise ValueError(
                "speculative_config: method 'draft_model' needs a served model with heads that store all "
                "tokens, on each rank, got none"
            )
        return cls(model, layers, config, blueprint)

    def share_of(self, served: Blueprint) -> float:
        """Share of the memory of blocks that the other model's stores get."""
        own, others = (each.memory_of(1, 0).block_bytes for each in (self.blueprint, served))
        return others / (own + others)

    def build(self, memory: MemoryPlan) -> tuple[KVStore, StepModel]:
        """Allocate its stores, with the blocks of the other model's.

        Args:
            memory: plan of the other model's stores.
        """
        plan = self.blueprint.memory_of(memory.num_blocks, memory.num_snapshots)
        return self.blueprint.build(self.model, plan, LiveRows())


def within(budget: DeviceBudget, share: float) -> DeviceBudget:
    """The budget of a share of what is left of a device."""
    own = int(budget.utilization * budget.total_bytes) - budget.held_bytes
    held = budget.held_bytes + int((1 - share) * max(0, own))
    return replace(budget, held_bytes=held, free_bytes=int(share * budget.free_bytes))


def check_vocabulary(path: str | Path, vocab_size: int, draft_path: Path, draft_vocab_size: int) -> None:
    """Raise ValueError unless two checkpoints have equal vocabularies, token by token.

    Without tokenizers, their sizes are compared.
    """
    first, second = (load_tokenizer(each) for each in (path, draft_path))
    if first is None or second is None:
        if vocab_size != draft_vocab_size:
            raise ValueError(
                f"speculative_config: expected a model with the vocabulary of {path}, {vocab_size} tokens, "
                f"got {draft_vocab_size} in {draft_path}"
            )
        return
    tokens, others = first.get_vocab(), second.get_vocab()
    differing = sorted({*tokens.items()} ^ {*others.items()}, key=lambda item: item[1])
    if differing:
        raise ValueError(
            f"speculative_config: expected a model with the vocabulary of {path}, got another one in "
            f"{draft_path}: {len(differing)} tokens differ, such as {differing[0][0]!r} with id "
            f"{differing[0][1]}"
        )
