"""The model, limits and costs that a table is planned for, and the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from graphs import BatchShape, BucketTable, CostFunction, StepCost, StepLimits
from graphs.bucket_file import from_shape, write_gaudi_buckets, write_table
from graphs.planner import (
    GraphBudget,
    Grid,
    PaddingReport,
    Traffic,
    exponential,
    linear,
    padding_aware,
    upstream_unified,
)
from graphs.table import PlannedPadding
from hpu_duo.cli.planning.hardware import HardwareOptions
from hpu_duo.cli.planning.offload import TierOptions
from hpu_duo.config.engine import EngineConfig
from hpu_duo.config.overrides import EngineOverrides
from hpu_duo.planning.model import ModelSize
from hpu_duo.planning.read_model import read_model
from hpu_duo.planning.simulation import plan_buckets, prior

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
    cost: CostFunction
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
        offloading: TierOptions,
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
        speculation = config.scheduler.speculation
        if speculation is not None and speculation.has_own_stores:
            raise ValueError(
                "tables are planned without a model that drafts over stores of its own: expected another "
                f"method of speculative_config, got {speculation.method!r}"
            )
        plain = served.on(hardware, config.scheduler, config.cache.block_size, kept)
        serving = offloading.serving(size, plain)
        found = served.compare(size, serving, num_graphs)
        deployment = served.deployment(size, serving, config.scheduler.max_model_len or size.max_positions)
        limits, decode_len = step_limits(deployment), asked["decode_len"]
        limits = replace(
            limits,
            decode_len=decode_len,
            draft_lens=(1, decode_len) if limits.chunk_grid and decode_len > 1 else (),
        )
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


# Tables are planned for users of seed 0, and compared on those of seed 1.
_MEASURED_SEED = 2
_LONGEST_LIST = 20_000


def choose(
    name: str, limits: StepLimits, cost: CostFunction, budget: GraphBudget, traffic: Traffic | None
) -> tuple[BatchShape, ...] | Grid:
    """Return the table that a strategy gives; budget and traffic are for the planned one."""
    match name:
        case "planned":
            return plan_buckets(limits, budget, cost, traffic).buckets
        case "thinned":
            return BucketTable.exponential(limits, cost=cost).buckets
        case "upstream-unified":
            return upstream_unified(limits)
        case "exponential":
            return exponential(limits)
        case "linear":
            return linear(limits)
        case _:
            return padding_aware(limits)


def measured_on(
    chosen: tuple[BatchShape, ...] | Grid,
    limits: StepLimits,
    cost: CostFunction,
    recorded: Traffic | None,
    trims_chunks: bool,
) -> Traffic:
    """Return the recorded traffic, or else that of users that no table was chosen for.

    Args:
        trims_chunks: whether their prompts end at the borders of the chosen table.
    """
    if recorded is not None:
        return recorded
    table = BucketTable(listed(chosen), cost) if trims_chunks else None
    return prior(limits, seed=_MEASURED_SEED, table=table, cost=cost)


def listed(chosen: tuple[BatchShape, ...] | Grid) -> tuple[BatchShape, ...]:
    """All shapes, sorted.

    Raises:
        ValueError: they are too many to list.
    """
    if not isinstance(chosen, Grid):
        return tuple(sorted(chosen))
    if len(chosen) > _LONGEST_LIST:
        raise ValueError(
            f"expected a strategy that makes at most {_LONGEST_LIST:,} shapes, this one makes "
            f"{len(chosen):,}; --compare shows what it costs"
        )
    return tuple(sorted(chosen.buckets()))


def write(
    out: Path | None,
    gaudi_out: Path | None,
    shapes: tuple[BatchShape, ...],
    comment: str,
    planned_padding: PlannedPadding,
) -> None:
    """Write the table with the padding that it promises, and the file for vllm-gaudi, where asked to.

    Raises:
        ValueError: a file cannot be written.
    """
    try:
        if out is not None:
            write_table(out, shapes, comment, planned_padding)
        if gaudi_out is not None:
            write_gaudi_buckets(gaudi_out, (b for shape in shapes for b in from_shape(shape)), comment)
    except OSError as error:
        raise ValueError(f"cannot write {error.filename}: {error.strerror}") from error


def bucket_table(shapes: tuple[BatchShape, ...], cost: CostFunction) -> Table:
    """The shapes, cheapest first, with their costs relative to the first."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("phase", "query tokens", "shared blocks", "unique blocks", "logit rows", "cost"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    least = min(map(cost, shapes))
    for shape in sorted(shapes, key=cost):
        table.add_row(
            str(shape.phase), *(f"{size:,}" for size in shape.levels[3:]), f"{cost(shape) / least:.2f}"
        )
    return table


def padding_table(reports: Mapping[str, PaddingReport], is_recorded: bool) -> Table:
    """The strategies side by side.

    Args:
        is_recorded: whether they were measured on the recording that the planned table was made from.
    """
    traffic = "the recorded steps themselves (later ones may pad more)" if is_recorded else "assumed traffic"
    table = Table(box=None, padding=(0, 2, 0, 0), title=f"Padding of {traffic}", title_justify="left")
    columns: tuple[tuple[str, Any], ...] = (
        ("strategy", "left"),
        ("graphs", "right"),
        ("mean", "right"),
        ("worst step", "right"),
        ("worst possible", "right"),
        ("steps without a bucket", "right"),
    )
    for name, justify in columns:
        table.add_column(name, justify=justify)
    for name, report in reports.items():
        table.add_row(
            name,
            f"{report.num_buckets:,}",
            f"{report.mean:.1%}",
            f"{report.worst:.0%}",
            f"{report.worst_reachable:.0%}",
            f"{report.missed:.1%}",
        )
    return table
