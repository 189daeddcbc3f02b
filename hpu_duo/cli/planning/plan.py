"""``hpu-duo plan`` and ``capacity``: shapes to capture and requests that fit, from a config.json alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hpu_duo.cli.options import (
    LIMITS,
    Json,
    Kept,
    Only,
    changed,
    grouped,
    model_option,
    of_setting,
    option_in,
)
from hpu_duo.cli.planning.hardware import (
    HARDWARE,
    HardwareOptions,
    chain_buckets,
    graph_bytes,
    graph_memory,
    read_draft,
    report_fields,
    served_graph_bytes,
)
from hpu_duo.cli.planning.offload import Tier, TierOptions, add_fields
from hpu_duo.cli.terminal import Waiting, check_drawing, user_errors
from hpu_duo.config.limits import CARD_LIMITS, CacheConfig, SchedulerConfig
from hpu_duo.config.overrides import EngineOverrides
from hpu_duo.garbage import collector_paused
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from graphs import BatchShape
    from graphs.planner import GraphBudget, PaddingReport, Traffic
    from hpu_duo.cli.planning.setting import Setting
    from hpu_duo.config.speculation import SpeculativeConfig
    from hpu_duo.planning.model import TableMemory

_hardware_option = option_in(HARDWARE)
_limits_option = option_in(LIMITS)

_budget_option = option_in("Budget")
_output_option = option_in("Output")
_GIB = 1 << 30
STRATEGIES = ("planned", "thinned", "upstream-unified", "exponential", "linear", "padding-aware")


PlannedLimits = Annotated[
    EngineOverrides,
    Only(
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_chunk_rows"),
        *("block_size", "decode_len", "speculative_config", "trim_chunks"),
    ),
]
"""Limits of the steps that a table is planned for."""


@dataclass(frozen=True)
class BudgetOptions:
    """Bounds on the cost of a table."""

    graphs_budget: Annotated[int, _budget_option("Most shapes to capture, when planned.")] = 64
    max_seconds: Annotated[
        float | None, _budget_option("Most time to capture them in.", show_default="no limit")
    ] = None
    seconds_per_graph: Annotated[
        float,
        _budget_option("Seconds of one graph, for --max-seconds; public figures for Gaudi are 0.7 to 14."),
    ] = 14.0
    max_gib: Annotated[
        float | None,
        _budget_option(
            "Most device memory for graphs, if each has intermediates of its own.", show_default="no limit"
        ),
    ] = None

    def in_time(self) -> GraphBudget:
        """The budget without its memory; ValueError for a bound that leaves nothing."""
        from graphs.planner import GraphBudget

        return GraphBudget(
            self.graphs_budget,
            seconds=self.max_seconds,
            seconds_per_graph=None if self.max_seconds is None else self.seconds_per_graph,
        )

    def budget(self, bytes_of: Callable[[], Callable[[BatchShape], float]]) -> GraphBudget:
        """The whole budget.

        Args:
            bytes_of: gives the bytes that a graph keeps; called only if memory is bounded.

        Raises:
            ValueError: a bound leaves nothing.
        """
        in_time = self.in_time()
        if self.max_gib is None:
            return in_time
        return replace(in_time, memory_bytes=self.max_gib * _GIB, bytes_of=bytes_of())


@dataclass(frozen=True)
class OutputOptions:
    """Files to write."""

    png: Annotated[
        Path | None,
        _output_option(
            "Also draw what fits and how fast it would be; needs matplotlib.", show_default="no picture"
        ),
    ] = None
    out: Annotated[Path | None, _output_option("Write the table, to load it with.", metavar="FILE")] = None
    gaudi_out: Annotated[
        Path | None, _output_option("Write it as VLLM_BUCKETING_FROM_FILE too.", metavar="FILE")
    ] = None

    @property
    def takes_table(self) -> bool:
        """Whether the table is written to a file."""
        return self.out is not None or self.gaudi_out is not None

    def check(self) -> None:
        """Raise ValueError unless every file can be written."""
        for name, file in (("--out", self.out), ("--gaudi-out", self.gaudi_out)):
            if file is not None:
                check_file(name, file)
        if self.png is not None:
            check_drawing(self.png)


@dataclass(frozen=True)
class TableOptions:
    """Strategy that chooses the table, and the traffic that it is chosen for."""

    from_shapes: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Shapes that --record-shapes wrote; repeat for several.",
            show_default="a stated guess about traffic",
        ),
    ] = None
    strategy: Annotated[str, typer.Option(help=f"One of {', '.join(STRATEGIES)}.")] = "planned"
    compare: Annotated[bool, typer.Option("--compare", help="Show all strategies side by side.")] = False

    @property
    def names(self) -> tuple[str, ...]:
        """Strategies to show, the chosen one first."""
        return tuple(dict.fromkeys((self.strategy, *(STRATEGIES if self.compare else ()))))

    def check(self, trims_chunks: bool) -> None:
        """Raise ValueError for an unknown strategy, or for prompts to trim where that cannot be tried."""
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"expected --strategy to be one of {', '.join(STRATEGIES)}, got {self.strategy!r}"
            )
        if trims_chunks and self.from_shapes:
            raise ValueError(
                "expected --trim-chunks without --from-shapes: recorded steps are as long as they were"
            )
        if trims_chunks and self.compare:
            raise ValueError(
                "expected --trim-chunks without --compare: some strategies make too many shapes to trim to"
            )

    def recorded(self) -> Traffic | None:
        """The recorded traffic; None without a recording.

        Raises:
            ValueError: a file cannot be read, or is no recording.
        """
        from graphs.bucket_file import read_shapes

        return read_shapes(*self.from_shapes) if self.from_shapes else None


@grouped
def capacity(
    *,
    model: Annotated[
        Path,
        model_option("Directory with a config.json, or the file; no weights needed.", needs_weights=False),
    ],
    hardware: Annotated[str, typer.Option(help="gaudi2 or gaudi3.")] = "gaudi3",
    served: HardwareOptions,
    kept: Kept,
    block_size: Annotated[int, of_setting("block_size")] = CacheConfig.block_size,
    max_num_seqs: Annotated[
        int, _limits_option("Most running requests, even if more fit.")
    ] = CARD_LIMITS.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, of_setting("max_num_batched_tokens")
    ] = CARD_LIMITS.max_num_batched_tokens,
    speculative_config: Annotated[str | None, of_setting("speculative_config", panel=LIMITS)] = None,
    offloading: TierOptions,
    png: Annotated[
        Path | None, typer.Option(help="Also draw it; needs matplotlib.", show_default="no picture")
    ] = None,
    as_json: Json = False,
) -> None:
    """Requests that fit and predicted speed on Gaudi, against context, sparsity and KV format.

    Computed from public figures of Gaudi 2 and 3; this project has not measured any Gaudi.
    """
    with user_errors():
        if png is not None:
            check_drawing(png)
        serving = served.on(
            hardware,
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                speculative_config=speculative_config,
            ),
            block_size,
            kept,
        )
        tiers = offloading.tiers(serving.num_devices)
        # transformers is slow to import: everything that can be refused without it comes first.
        from hpu_duo.planning.read_model import read_model

        size = read_model(model)
        serving = offloading.serving(size, serving)
        speculation = SchedulerConfig(speculative_config=speculative_config).speculation
        draft = read_draft(speculation, model)
        drafted_by = None
        if draft is not None:
            serving, drafted_by = replace(serving, draft=draft[0]), draft[1]
        found = served.compare(size, serving)
        memories = served.graph_memories(model, size, serving, speculation, drafted_by)
        evens = [] if speculation is None else served.break_evens(size, serving, found, speculation)
        if png is not None:
            from hpu_duo.cli.planning.tables import draw

            draw(size, serving, found, png)
    if as_json:
        fields = report_fields(size, serving, found)
        for one, memory in zip(fields["capacities"], memories):
            one["graph_memory"] = None if memory is None else memory._asdict()
        add_fields(fields, tiers, found)
        if evens:
            fields["drafts_pay_from"] = [each.fields() for each in evens]
        typer.echo(json.dumps(fields, indent=2))
    else:
        from hpu_duo.cli.planning.tables import print_report

        print_report(size, serving, found, memories=memories, evens=evens, tiers=tiers)


@grouped
@collector_paused()
def plan(
    *,
    model: Annotated[Path, model_option("Directory with config.json, or the file.", needs_weights=False)],
    num_blocks: Annotated[
        int | None, _limits_option("KV blocks that are allocated.", show_default="what fits on --hardware")
    ] = None,
    asked: PlannedLimits,
    within: BudgetOptions,
    hardware: Annotated[
        str | None,
        _hardware_option(
            "gaudi2 or gaudi3: show what fits and how fast it would be, and plan for it.",
            show_default="plan for any device",
        ),
    ] = None,
    served: HardwareOptions,
    kept: Kept,
    offloading: TierOptions,
    output: OutputOptions,
    table: TableOptions,
    as_json: Json = False,
) -> None:
    """Choose the shapes to capture for a model and limits, and say what padding costs.

    Needs no weights and no device. Costs are relative work, not time. With --hardware, also what fits and
    how fast it would be, computed from public figures.
    """
    with user_errors():
        table.check(asked["trim_chunks"])
        output.check()
        _draft_lens(asked)
        if hardware is None:
            _check_without_hardware(num_blocks, served, kept, offloading, output)
        # torch is slow to import: everything that can be refused without it comes first.
        from graphs.planner import evaluate
        from graphs.table import BucketTable, PlannedPadding
        from hpu_duo.cli.planning.setting import Setting, choose, listed, measured_on, write

        most_graphs, recorded = within.in_time().most_graphs, table.recorded()
        if hardware is not None:
            setting = Setting.on(hardware, model, served, asked, kept, offloading, num_blocks, most_graphs)
            assert setting.serving is not None, "expected hardware"
            tiers = offloading.tiers(setting.serving.num_devices)
        else:
            assert num_blocks is not None, "checked above"
            setting, tiers = Setting.anywhere(model, asked, num_blocks), ()
        if output.png is not None and setting.serving is not None:
            from hpu_duo.cli.planning.tables import draw

            with Waiting("drawing"):
                draw(setting.size, setting.serving, setting.found, output.png)
        limits, cost = setting.limits, setting.cost
        budget = within.budget(lambda: _graph_bytes(model, setting))
        with Waiting("searching buckets"):
            chosen = {name: choose(name, limits, cost, budget, recorded) for name in table.names}
        setting = setting.with_table(chosen[table.strategy])
        with Waiting("measuring what padding costs on simulated traffic"):
            reports = {
                name: evaluate(
                    each,
                    limits,
                    cost,
                    measured_on(each, limits, cost, recorded, trims_chunks=asked["trim_chunks"]),
                )
                for name, each in chosen.items()
            }
        shapes = kept_memory = None
        if output.takes_table or not table.compare:
            shapes = listed(chosen[table.strategy])
            if lens := _draft_lens(asked):
                shapes = BucketTable(shapes).with_drafts(lens).buckets
            comment = f"{table.strategy}, for {setting.size.name} and {limits}"
            planned_padding = PlannedPadding.by(cost, reports[table.strategy].mean)
            write(output.out, output.gaudi_out, shapes, comment, planned_padding)
            if setting.deployment is not None:
                speculation = _speculation(asked)
                drafted = () if speculation is None else chain_buckets(shapes, speculation)
                captured = (*shapes, *drafted)
                kept_memory = graph_memory(model, setting.deployment, captured, limits.decode_len, lens)
    if as_json:
        typer.echo(json.dumps(_fields(setting, reports, shapes, kept_memory, tiers), indent=2))
    else:
        _show(setting, reports, None if table.compare else shapes, recorded is not None, kept_memory, tiers)


def _draft_lens(asked: EngineOverrides) -> tuple[int, ...]:
    """Tokens of a row that steps without prompts may have; () without drafts.

    Raises:
        ValueError: ``speculative_config`` is none.
    """
    return SchedulerConfig(speculative_config=asked.get("speculative_config")).draft_lens


def _speculation(asked: EngineOverrides) -> SpeculativeConfig | None:
    return SchedulerConfig(speculative_config=asked.get("speculative_config")).speculation


def _graph_bytes(model: Path, setting: Setting) -> Callable[[BatchShape], float]:
    """Bytes that the graph of a bucket keeps on one device at worst; see ``graph_bytes``."""
    limits = setting.limits
    if setting.deployment is not None:
        return served_graph_bytes(model, setting.deployment, limits.decode_len)
    return graph_bytes(model, setting.size, setting.kv_layers, limits.block_size, limits.decode_len)


def _fields(
    setting: Setting,
    reports: Mapping[str, PaddingReport],
    shapes: tuple[BatchShape, ...] | None,
    kept_memory: TableMemory | None,
    tiers: Sequence[Tier],
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "limits": asdict(setting.limits),
        "padding": {name: asdict(report) for name, report in reports.items()},
    }
    if shapes is not None:
        fields["buckets"] = list(map(str, shapes))
    if setting.serving is not None:
        fields["hardware"] = report_fields(setting.size, setting.serving, list(setting.found))
        add_fields(fields["hardware"], tiers, setting.found)
    if kept_memory is not None:
        fields["graph_memory"] = kept_memory._asdict()
    return fields


def _show(
    setting: Setting,
    reports: Mapping[str, PaddingReport],
    shapes: tuple[BatchShape, ...] | None,
    is_recorded: bool,
    kept_memory: TableMemory | None,
    tiers: Sequence[Tier],
) -> None:
    from hpu_duo.cli.planning.setting import bucket_table, padding_table
    from hpu_duo.cli.planning.tables import print_report

    console = Console()
    if setting.serving is not None:
        print_report(setting.size, setting.serving, setting.found, console, tiers=tiers)
        planned_for = setting.found[0].describe()
        console.print(f"Table for {setting.limits.num_blocks:,} blocks and {planned_for}", style="bold")
    if shapes is not None:
        console.print(bucket_table(shapes, setting.cost))
    if kept_memory is not None:
        console.print(kept_memory.describe(), highlight=False)
    console.print(padding_table(reports, is_recorded))


def _check_without_hardware(
    num_blocks: int | None,
    served: HardwareOptions,
    kept: EngineOverrides,
    offloading: TierOptions,
    output: OutputOptions,
) -> None:
    if num_blocks is None:
        raise ValueError("expected --num-blocks, or --hardware to find out how many fit, got neither")
    compared = {
        "--context": served.context,
        "--sparsity": served.sparsity,
        "--kv-cache-dtype": served.kv_cache_dtype,
        "--png": output.png,
        "--kv-offloading-size": offloading.kv_offloading_size,
        "--kv-offloading-disk-size": offloading.kv_offloading_disk_size,
        "--cpu-offload-gb": offloading.cpu_offload_gb or None,
        "--offload-policy": offloading.offload_policy,
        **dict.fromkeys(changed(kept), True),
    }
    for name, value in compared.items():
        if value is not None:
            raise ValueError(f"expected --hardware with {name}, got none")
