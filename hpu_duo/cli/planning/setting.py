"""The model, limits and costs that a table is planned for, anywhere or on named hardware."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphs import BatchShape, StepCost, StepLimits
from graphs.planner import Grid
from hpu_duo.cli.planning.hardware import HardwareOptions
from hpu_duo.config.engine import EngineConfig
from hpu_duo.config.overrides import EngineOverrides
from hpu_duo.planning.model import ModelSize
from hpu_duo.planning.read_model import read_model

if TYPE_CHECKING:
    from hpu_duo.kv.plan import LayerKV
    from hpu_duo.planning import Capacity, Deployment, Serving


@dataclass(frozen=True)
class Setting:
    """A model as it is to be served.

    Attributes:
        size: of the model.
        limits, cost: of its steps.
        serving: the devices; None without named hardware, and then nothing is in ``found``.
        found: what fits and how fast it would be for each choice, the one that is planned for first.
        deployment: the choice that is planned for; None without named hardware.
    """

    size: ModelSize
    limits: StepLimits
    cost: StepCost
    serving: Serving | None = None
    found: tuple[Capacity, ...] = ()
    deployment: Deployment | None = None

    @classmethod
    def anywhere(cls, model: Path, asked: EngineOverrides, num_blocks: int) -> Setting:
        """A model on any device with so many blocks.

        Raises:
            ValueError: the model cannot be read, or a limit is out of range.
        """
        size = read_model(model)
        limits = StepLimits(
            max_num_seqs=asked["max_num_seqs"],
            max_num_batched_tokens=asked["max_num_batched_tokens"],
            max_model_len=asked["max_model_len"] or size.max_positions,
            block_size=asked["block_size"],
            num_blocks=num_blocks,
            decode_len=asked["decode_len"],
            max_chunk_rows=asked["max_chunk_rows"],
        )
        return cls(size, limits, _cost_anywhere(size, limits.block_size))

    @classmethod
    def on(
        cls,
        hardware: str,
        model: Path,
        served: HardwareOptions,
        asked: EngineOverrides,
        kept: EngineOverrides,
        num_blocks: int | None,
        num_graphs: int,
    ) -> Setting:
        """A model on named hardware, with the blocks that fit there unless others are asked for.

        Args:
            num_graphs: most buckets, which bound the warm-up.

        Raises:
            ValueError: the model cannot be read or does not fit, or a limit is out of range.
        """
        # They know the kinds of heads and so torch, which is slow to import.
        from hpu_duo.planning import step_cost, step_limits

        size = read_model(model)
        config = EngineConfig.of(**asked)
        serving = served.on(hardware, config.scheduler, config.cache.block_size, kept)
        found = served.compare(size, serving, num_graphs)
        deployment = served.deployment(size, serving, config.scheduler.max_model_len or size.max_positions)
        limits = replace(step_limits(deployment), decode_len=config.scheduler.decode_len)
        if num_blocks is not None:
            limits = replace(limits, num_blocks=num_blocks)
        return cls(size, limits, step_cost(deployment), serving, tuple(found), deployment)

    @property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        """The groups of heads of each layer; without named hardware all of them keep all tokens."""
        if self.deployment is not None:
            return self.deployment.kv_layers
        return self.size.kv_layers(0.0, 0, 1, self.size.max_positions)

    def with_table(self, chosen: tuple[BatchShape, ...] | Grid) -> Setting:
        """The same with the warm-up of a table for the choice that was planned for."""
        if self.deployment is None or not len(chosen):
            return self
        from hpu_duo.planning import WarmUp
        from hpu_duo.planning.capacities import SMALLEST_DECODE

        compiled, num_kinds = self.deployment.engine_work.compiled, self.deployment.num_layer_kinds
        if isinstance(chosen, Grid):
            fewest, most = compiled(SMALLEST_DECODE), compiled(self.limits.largest)
            warm_up = replace(WarmUp.within(len(chosen), num_kinds, fewest, most), is_bound=False)
        else:
            warm_up = WarmUp.of(map(compiled, chosen), num_kinds)
        return replace(self, found=(replace(self.found[0], warm_up=warm_up), *self.found[1:]))


def _cost_anywhere(size: ModelSize, block_size: int) -> StepCost:
    """The cost of a step of a model on no device in particular."""
    first = size.layers[0]
    return StepCost(
        block_size=block_size,
        hidden_size=size.hidden_size,
        num_layers=len(size.layers),
        vocab_size=size.vocab_size,
        kv_ratio=first.num_kv_heads / first.num_heads,
    )
