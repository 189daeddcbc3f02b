"""A model that drafts for another one: its checkpoint, its vocabulary, its stores beside the other's.

Or the served model's own layers of multi-token prediction, which have such stores too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from bias_builders import Behind
from graphs import BatchShape
from hpu_duo.config.engine import EngineConfig, HeadConfig, ParallelConfig
from hpu_duo.config.limits import DeviceBudget
from hpu_duo.config.speculation import SpeculativeConfig
from hpu_duo.engine.model_drafts.mtp import MtpTables
from hpu_duo.engine.model_drafts.tables import DraftTables, DraftWindow
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.kv.store import KVStore, mark_null
from hpu_duo.modeling.attention import LiveRows
from hpu_duo.modeling.hub import find_checkpoint
from hpu_duo.modeling.loading import load_model, load_tokenizer, read_config
from hpu_duo.modeling.mtp import HiddenStates, load_mtp
from hpu_duo.modeling.precision import Precision
from hpu_duo.modeling.probe import DecoderLayer, probe
from hpu_duo.modeling.step_model import StepModel
from hpu_duo.parallel import ContextParallelBlocks
from hpu_duo.startup.blueprint import Blueprint, choose_kernels, fix_served_len
from hpu_duo.startup.heads import HeadAssignment, choose_heads
from hpu_duo.startup.tables import StepTables
from kernels_ref import Blocks, ChosenBlocks, Rings, Softmax
from kernels_ref.groups.latents import LatentBlocks

_KNOWN = (Blocks, LatentBlocks)
"""Kinds of heads that a model that drafts may have: they store all tokens."""


@dataclass(frozen=True)
class DraftModel:
    """A model in memory that drafts for another one, or layers that do.

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
        cls,
        config: EngineConfig,
        model: PreTrainedModel,
        served: Blueprint,
        hf_config: Any,
        precision: Precision,
        place: Any,
    ) -> DraftModel:
        """Read what ``speculative_config`` names, all of it on each rank.

        Args:
            model: that it drafts for, as transformers has loaded it.
            served: its blueprint.
            hf_config: transformers' configuration of it, of all of it where ranks share it.
            place: see ``device_side.Place``.

        Raises:
            ValueError: it cannot be read or served, has another vocabulary, or heads that do not store all
                tokens, or the model that it drafts for has no such heads.
        """
        speculation = config.scheduler.speculation
        assert speculation is not None, "a model drafts"
        path = config.model.path if speculation.model is None else find_checkpoint(speculation.model)
        config = replace(
            config,
            model=replace(config.model, path=path, quantization="auto"),
            heads=HeadConfig(),
            parallel=ParallelConfig(),
            # Scales, numbers of layers and budgets are those of the served model; ranks store whole blocks.
            cache=replace(
                config.cache,
                block_size=config.block_size,
                kv_scales=None,
                kv_cache_dtype_skip_layers=(),
                kv_policy=None,
                kv_budget=None,
                kv_plan=None,
                kv_prompt="chunks",
                kv_chunk=None,
            ),
            scheduler=replace(config.scheduler, max_model_len=served.max_len),
        )
        if speculation.model is None:
            number = model.config.get_text_config().num_hidden_layers
            model = _own_layers(model, path, hf_config, precision.weights, speculation.num_speculative_tokens)
            # By their numbers in the checkpoint.
            layers = tuple(replace(each, number=number + each.number) for each in probe(model))
        else:
            own, vocab_size = read_config(path), hf_config.get_text_config().vocab_size
            check_vocabulary(
                served.config.model.path, vocab_size, Path(path), own.get_text_config().vocab_size
            )
            model = load_model(path, own, precision.weights, place.first_device)
            try:
                fix_served_len(model, config)
            except ValueError as error:
                raise ValueError(f"speculative_config: model {speculation.model}: {error}") from error
            layers = probe(model)
        softmax, device = Softmax(config.model.softmax), place.device
        kernels = choose_kernels(config.model.attention, device, layers, precision.arithmetic, softmax)
        memory_bytes = place.runtime.total_bytes()
        chosen = choose_heads(config, layers, served.max_len, device)
        if speculation.model is None:
            chosen = chosen._replace(heads=_behind_first_tokens(chosen.heads))
        blueprint = Blueprint.draw(
            model, layers, config, device, kernels, chosen, memory_bytes=memory_bytes, precision=precision
        )
        kinds = {group.kind for spec in blueprint.specs for group in spec.groups}
        others = sorted({kind.describe() or kind.name for kind in kinds if type(kind) not in _KNOWN})
        states = {kind.name for spec in blueprint.specs for kind in spec.rows}
        others += sorted(states | {kind.name for each in blueprint.recurrent for kind in each.kinds})
        if others:
            raise ValueError(
                f"speculative_config: expected {_name(speculation)} whose heads store all tokens, "
                f"got {', '.join(others)}"
            )
        if served.memory_of(1, 0).block_bytes == 0:
            raise ValueError(
                f"speculative_config: method {speculation.method!r} needs a served model with heads that "
                "store all tokens, on each rank, got none"
            )
        return cls(model, layers, config, blueprint)

    def share_of(self, served: Blueprint) -> float:
        """Share of the memory of blocks that the other model's stores get."""
        own, others = (each.memory_of(1, 0).block_bytes for each in (self.blueprint, served))
        return others / (own + others)

    def build(self, memory: MemoryPlan, served: StepModel) -> tuple[KVStore, StepModel]:
        """Allocate its stores, with the blocks of the other model's.

        Args:
            memory: plan of the other model's stores.
            served: the other model; layers share its head.
        """
        plan = self.blueprint.memory_of(memory.num_blocks, memory.num_snapshots)
        live = LiveRows()
        if self.is_of_checkpoint:
            layers: Any = self.model
            layers.tie_with_main_model(served.model)  # its head may be packed now
            live = served.live
        return self.blueprint.build(self.model, plan, live)

    @property
    def is_of_checkpoint(self) -> bool:
        """Whether it is layers of the other model's checkpoint."""
        speculation = self.config.scheduler.speculation
        return speculation is not None and speculation.method == "mtp"

    @property
    def own_modules(self) -> nn.Module:
        """All modules that it does not share with the other model."""
        model: Any = self.model
        modules: nn.Module = model.own_modules if self.is_of_checkpoint else model
        return modules

    def states(self, largest: BatchShape, num_blocks: int, device: torch.device) -> HiddenStates:
        """Allocate the tensors besides its stores that stay on the device between steps.

        Args:
            largest: step.
            num_blocks: of its stores.
            device: of them; "meta" for their sizes alone.
        """
        sizes = (len(self.layers), self.blueprint.text_config.hidden_size)
        blocks = (num_blocks, self.config.block_size)
        decode_len = self.config.scheduler.decode_len
        states = HiddenStates.zeros(largest, decode_len, blocks, *sizes, self.blueprint.dtype, device)
        for ends in states.ends:
            mark_null(ends, num_blocks, num_blocks + 1, is_state=True)
        return states


def _name(speculation: SpeculativeConfig) -> str:
    return "a layer" if speculation.model is None else f"a model {speculation.model}"


def _behind_first_tokens(heads: Sequence[HeadAssignment]) -> tuple[HeadAssignment, ...]:
    """The heads of layers of multi-token prediction, each of which hides one token more of the first ones."""
    found = list(heads[:1])
    for number, each in enumerate(heads[1:], 1):
        kinds = [group.kind for group in each.groups]
        kinds = [replace(kind, rule=Behind(number)) if type(kind) is Blocks else kind for kind in kinds]
        groups = tuple(replace(group, kind=kind) for group, kind in zip(each.groups, kinds))
        found.append(each._replace(groups=groups))
    return tuple(found)


def _own_layers(
    model: PreTrainedModel, path: str | Path, hf_config: Any, dtype: torch.dtype, most: int
) -> PreTrainedModel:
    """Read the layers of multi-token prediction of a model in memory, for so many drafts."""
    if not str(path) or not Path(path).is_dir():
        raise ValueError(
            "speculative_config: method 'mtp' reads a layer of the checkpoint: expected a path, got a loaded "
            "model"
        )
    layers: PreTrainedModel = load_mtp(model, path, hf_config, dtype, most)
    return layers


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


def draft_fields(speculation: SpeculativeConfig, tables: StepTables, memory: MemoryPlan) -> DraftTables:
    """Return the fields of drafts that a model makes."""
    window = None
    if speculation.method == "mtp":
        return MtpTables(tables.geometry(memory))
    if speculation.method == "duo":
        window = DraftWindow(speculation.draft_sink, speculation.draft_recent)
    # Kinds of heads tell whether some of them read more than a window.
    kinds = [group.kind for group in memory.groups_of_ranks if isinstance(group.kind, Blocks)]
    reads_all = speculation.draft_sparsity is not None and not all(kind.drafts_in_window for kind in kinds)
    return DraftTables(tables.geometry(memory), window, memory.uses_blocks, reads_all)


def check_stores(model: StepModel) -> None:
    """Raise ValueError for a model with states that a draft would change."""
    served = Blocks | ChosenBlocks | Rings | ContextParallelBlocks
    kinds = [group.kind for spec in model.specs for group in spec.groups]
    others = {kind.describe() or kind.name for kind in kinds if not isinstance(kind, served)}
    others |= {kind.name for spec in model.specs for kind in spec.rows}
    if others:
        raise ValueError(
            "speculative_config with method 'duo' drafts over the stores of the model: expected heads that "
            f"store all tokens or a window, got {', '.join(sorted(others))}"
        )
