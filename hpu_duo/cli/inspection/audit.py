"""``hpu-duo audit``: the operators and memory of every step on an HPU, from a config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpu_duo.cli.arguments.kv_options import KVOptions
from hpu_duo.cli.arguments.model_names import model_option
from hpu_duo.cli.arguments.option_groups import grouped
from hpu_duo.cli.arguments.options import (
    LIMITS,
    Buckets,
    DeviceMemoryUtilization,
    Dtype,
    EnablePrefixCaching,
    HeadOptions,
    Json,
    LimitOptions,
    NumPrefixSnapshots,
)
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.cli.terminal.sizes import parse_bytes
from hpu_duo.limit_config import CacheConfig, SchedulerConfig

if TYPE_CHECKING:
    from hpu_duo.audit import AuditReport, Structure

FOUND_FORBIDDEN = 1


@grouped
def audit(
    *,
    model: Annotated[
        Path, model_option("Directory with a config.json; no weights needed.", needs_weights=False)
    ],
    hardware: Annotated[
        str, typer.Option(help="gaudi2 or gaudi3: how many KV blocks fit, unless they are given.")
    ] = "gaudi3",
    heads: HeadOptions,
    kept: KVOptions,
    dtype: Dtype = "auto",
    attention: Annotated[
        str, typer.Option(help="Attention kernels: reference, or hpu for the fused operators.")
    ] = "reference",
    limits: LimitOptions,
    num_blocks: Annotated[
        int | None,
        typer.Option(help="KV blocks to hold.", show_default="what fits", rich_help_panel=LIMITS),
    ] = None,
    kv_cache_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the KV cache instead of a number of blocks, such as 4GiB.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    device_memory_utilization: DeviceMemoryUtilization = CacheConfig.device_memory_utilization,
    enable_prefix_caching: EnablePrefixCaching = CacheConfig.enable_prefix_caching,
    num_prefix_snapshots: NumPrefixSnapshots = None,
    buckets: Buckets = None,
    bucket: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHAPE", help="Only this bucket, such as csu/q2048/s64/u512/l32; repeat for several."
        ),
    ] = None,
    fail_on_unknown: Annotated[
        bool,
        typer.Option("--fail-on-unknown", help="End with 1 for operators that public sources do not show."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Trace every step without weights or device, and say what it asks of an HPU.

    Ends with 1 if a step does what an HPU does badly, wrongly or not at all. Proves nothing about
    compilers or speed.
    """
    with user_errors():
        if buckets is not None and bucket:
            raise ValueError("expected --buckets or --bucket, got both")
        cache_bytes = None if kv_cache_bytes is None else parse_bytes(kv_cache_bytes)
        # torch is slow to import: everything that can be refused without it comes first.
        from graphs import BucketTable
        from graphs.bucket_file import read_table
        from hpu_duo.audit import build_structure
        from hpu_duo.config import EngineConfig, GraphConfig, HeadConfig, ModelConfig
        from hpu_duo.cost import find_hardware

        table = None if buckets is None else read_table(buckets)
        structure = build_structure(
            EngineConfig(
                model=ModelConfig(path=model, dtype=dtype, attention=attention),
                heads=HeadConfig(**vars(heads)),
                cache=CacheConfig(
                    block_size=limits.block_size,
                    num_blocks=num_blocks,
                    kv_cache_bytes=cache_bytes,
                    enable_prefix_caching=enable_prefix_caching,
                    num_prefix_snapshots=num_prefix_snapshots,
                    device_memory_utilization=device_memory_utilization,
                    **vars(kept),
                ),
                scheduler=SchedulerConfig(
                    max_num_seqs=limits.max_num_seqs,
                    max_num_batched_tokens=limits.max_num_batched_tokens,
                    max_model_len=limits.max_model_len,
                    max_chunk_rows=limits.max_chunk_rows,
                ),
                graph=GraphConfig(table=BucketTable.from_strings(bucket) if bucket else table),
            ),
            find_hardware(hardware),
        )
    report = _traced(structure, shows_progress=not as_json)
    if as_json:
        from hpu_duo.cli.inspection.tables import report_fields

        typer.echo(json.dumps(report_fields(report), indent=2))
    else:
        from hpu_duo.cli.inspection.tables import print_report

        print_report(report)
    if report.violations or (fail_on_unknown and report.unknown):
        raise typer.Exit(FOUND_FORBIDDEN)


def _traced(structure: Structure, *, shows_progress: bool) -> AuditReport:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from hpu_duo.audit import audit as trace

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    is_hidden = not (shows_progress and console.is_terminal)
    with user_errors(), Progress(*columns, console=console, transient=True, disable=is_hidden) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name)

        return trace(structure, progress)
