"""``hpu-duo capacity``: requests that fit on a Gaudi, and predicted speed, from a config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpu_duo.cli.arguments.options import (
    LIMITS,
    DeviceMemoryUtilization,
    EnablePrefixCaching,
    Json,
    KVOptions,
    NumPrefixSnapshots,
    grouped,
)
from hpu_duo.cli.arguments.values import model_option
from hpu_duo.cli.planning.hardware import RECENT, SINK, HardwareOptions, report_fields
from hpu_duo.cli.terminal.drawing import check_drawing
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.config.device_budget import GRAPH_MEMORY_SHARE
from hpu_duo.config.limits import CARD_LIMITS, HPU_LAYER_KINDS, CacheConfig, SchedulerConfig

_HEADS = "Heads"


@grouped
def capacity(
    *,
    model: Annotated[
        Path,
        model_option("Directory with a config.json, or the file; no weights needed.", needs_weights=False),
    ],
    hardware: Annotated[str, typer.Option(help="gaudi2 or gaudi3.")] = "gaudi3",
    devices: Annotated[int, typer.Option(help="Devices that share the model.")] = 1,
    retrieval_parallel: Annotated[
        str,
        typer.Option(
            help="What devices share of retrieval heads: heads, or the tokens of each of them (context).",
            metavar="heads|context",
        ),
    ] = "heads",
    dtype: Annotated[str, typer.Option(help="Format of the weights of layers: bf16 or fp8.")] = "bf16",
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Lengths of context, in tokens.",
            show_default="8192 32768 131072 524288, as the model allows",
        ),
    ] = None,
    sparsity: Annotated[
        list[float] | None,
        typer.Option(
            help="Shares of KV heads that stream; 0 is full attention.",
            show_default="0 0.5 0.75",
            rich_help_panel=_HEADS,
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        list[str] | None,
        typer.Option(help="Formats of keys and values.", show_default="bf16 fp8", rich_help_panel=LIMITS),
    ] = None,
    pattern: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a head pattern: its heads stream by their scores, and its layers are counted.",
            show_default="heads that stream are spread evenly over the layers",
            rich_help_panel=_HEADS,
        ),
    ] = None,
    max_layer_kinds: Annotated[
        int,
        typer.Option(
            help="Most kinds of layers, each compiled for every bucket; heads retrieve to keep to it.",
            rich_help_panel=_HEADS,
        ),
    ] = HPU_LAYER_KINDS,
    sink: Annotated[
        int | None,
        typer.Option(
            help="First tokens that streaming heads keep.",
            show_default=f"the pattern's, or {SINK}",
            rich_help_panel=_HEADS,
        ),
    ] = None,
    recent: Annotated[
        int | None,
        typer.Option(
            help="Newest tokens that streaming heads keep.",
            show_default=f"the pattern's, or {RECENT}",
            rich_help_panel=_HEADS,
        ),
    ] = None,
    kept: KVOptions,
    block_size: Annotated[
        int, typer.Option(help="Tokens of one KV block.", rich_help_panel=LIMITS)
    ] = CacheConfig.block_size,
    max_num_seqs: Annotated[
        int, typer.Option(help="Requests that run at once even if more fit.", rich_help_panel=LIMITS)
    ] = CARD_LIMITS.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(help="Tokens of one step; longer prompts are cut into chunks.", rich_help_panel=LIMITS),
    ] = CARD_LIMITS.max_num_batched_tokens,
    device_memory_utilization: DeviceMemoryUtilization = CacheConfig.device_memory_utilization,
    graph_memory: Annotated[
        float,
        typer.Option(help="Share of what weights leave of that for graphs.", rich_help_panel=LIMITS),
    ] = GRAPH_MEMORY_SHARE,
    enable_prefix_caching: EnablePrefixCaching = CacheConfig.enable_prefix_caching,
    num_prefix_snapshots: NumPrefixSnapshots = None,
    attention: Annotated[
        str, typer.Option(help="Attention kernels: hpu for Gaudi's fused operators, or reference.")
    ] = "hpu",
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
        asked = HardwareOptions(
            devices=devices,
            dtype=dtype,
            context=context,
            sparsity=sparsity,
            kv_cache_dtype=kv_cache_dtype,
            pattern=pattern,
            max_layer_kinds=max_layer_kinds,
            sink=sink,
            recent=recent,
            device_memory_utilization=device_memory_utilization,
            graph_memory=graph_memory,
            enable_prefix_caching=enable_prefix_caching,
            num_prefix_snapshots=num_prefix_snapshots,
            attention=attention,
        )
        if retrieval_parallel not in ("heads", "context"):
            # What "auto" takes depends on the length, and every length is shown here.
            raise ValueError(f"expected --retrieval-parallel heads or context, got {retrieval_parallel!r}")
        serving = asked.on(
            hardware,
            SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
            block_size,
            kept,
            retrieval_parallel,
        )
        # transformers is slow to import: everything that can be refused without it comes first.
        from hpu_duo.planning.read_model import read_model

        size = read_model(model)
        found = asked.compare(size, serving)
        if png is not None:
            from hpu_duo.cli.planning.plot import draw

            draw(size, serving, found, png)
    if as_json:
        typer.echo(json.dumps(report_fields(size, serving, found), indent=2))
    else:
        from hpu_duo.cli.planning.tables import print_report

        print_report(size, serving, found)
