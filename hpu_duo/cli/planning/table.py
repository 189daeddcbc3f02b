"""``hpu-duo table``: bucket tables and manifests shown, compared, merged and converted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpu_duo.cli.options import Json
from hpu_duo.cli.terminal import user_errors
from hpu_duo.config.limits import CacheConfig
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphs import BatchShape, BucketTable
    from graphs.table_edits import TableUse

app = typer.Typer(help="Show, compare, merge and convert bucket tables.", no_args_is_help=True)

_Recording = Annotated[
    list[Path] | None,
    typer.Option(
        "--from-shapes",
        metavar="FILE",
        help="Count the steps that --record-shapes wrote; repeat for several.",
        show_default="no steps are counted",
    ),
]
_BlockSize = Annotated[
    int, typer.Option(min=1, help="Tokens of a block, by which buckets and padding are ranked.")
]
_Out = Annotated[Path, typer.Option(metavar="FILE", help="File to write.")]


@app.callback()
def _root() -> None:
    "Show, compare, merge and convert bucket tables. FILE is a table, a manifest, or a file of vllm-gaudi."


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Table, manifest or file of vllm-gaudi.")],
    from_shapes: _Recording = None,
    block_size: _BlockSize = CacheConfig.block_size,
    as_json: Json = False,
) -> None:
    """Phases, sizes and relative costs of the buckets; with a recording also their steps and the padding."""
    with user_errors():
        table = _read(file, block_size)
        use = _use(table, from_shapes)
    if as_json:
        typer.echo(json.dumps(_fields(table, use), indent=2))
        return
    from rich.console import Console

    console = Console()
    console.print(f"{file}: {_summary(table)}", highlight=False, soft_wrap=True)
    console.print(_bucket_table(table, use))
    if use is not None:
        console.print(_padding(use), highlight=False, soft_wrap=True)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE")],
    after: Annotated[Path, typer.Argument(metavar="AFTER")],
    from_shapes: _Recording = None,
    block_size: _BlockSize = CacheConfig.block_size,
    as_json: Json = False,
) -> None:
    """Buckets that only one of two tables has; with a recording also the padding of both."""
    with user_errors():
        tables = _read(before, block_size), _read(after, block_size)
        uses = [_use(table, from_shapes) for table in tables]
    gone, new = (sorted(set(one) - set(other)) for one, other in (tables, reversed(tables)))
    if as_json:
        fields: dict[str, Any] = {"only_before": list(map(str, gone)), "only_after": list(map(str, new))}
        if from_shapes:
            fields["padding"] = [_use_fields(use) for use in uses if use is not None]
        typer.echo(json.dumps(fields, indent=2))
        return
    for sign, shapes in (("-", gone), ("+", new)):
        for shape in shapes:
            typer.echo(f"{sign} {shape}")
    typer.echo(
        f"{len(gone)} only in {before}, {len(new)} only in {after}, {len(set(tables[0]) - set(gone))} in both"
    )
    for path, use in zip((before, after), uses):
        if use is not None:
            typer.echo(f"{path}: {_padding(use)}")


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Two tables or more.")],
    out: _Out,
    block_size: _BlockSize = CacheConfig.block_size,
) -> None:
    """Write a table of the buckets of several."""
    with user_errors():
        check_file("--out", out)
        if len(files) < 2:
            raise ValueError(f"expected two tables or more, got {files[0]} alone")
        tables = [_read(file, block_size) for file in files]
        merged = {shape for table in tables for shape in table}
        _write(out, sorted(merged), f"merged from {', '.join(file.name for file in files)}")
    typer.echo(f"{out}: {len(merged)} buckets")


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of VLLM_BUCKETING_FROM_FILE.")],
    out: _Out,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            help="Query tokens of a step that mixed buckets keep to.",
            show_default="those of the largest prompt in the file",
        ),
    ] = None,
    decode_sizes: Annotated[
        int,
        typer.Option(
            min=1,
            help="Most mixed buckets for each prompt bucket: beside decodes of the largest sizes, of a "
            "quarter of their blocks, a sixteenth and so on.",
        ),
    ] = 3,
) -> None:
    """Write a table for a file of vllm-gaudi, with the mixed buckets that it cannot have: c-u, csu, -su."""
    with user_errors():
        check_file("--out", out)
        from graphs.bucket_file import read_gaudi_buckets
        from graphs.table_edits import mixed_buckets

        if max_num_batched_tokens is not None and max_num_batched_tokens < 1:
            raise ValueError(f"expected --max-num-batched-tokens >= 1, got {max_num_batched_tokens}")
        given = sorted({bucket.to_shape() for bucket in read_gaudi_buckets(file)})
        added = mixed_buckets(given, max_num_batched_tokens, decode_sizes)
        _write(out, sorted({*given, *added}), f"imported from {file.name}")
    typer.echo(f"{out}: {len(given)} buckets of the file, {len(added)} mixed ones added:")
    for shape in added:
        typer.echo(f"+ {shape}")
    phases = {str(shape.phase) for shape in (*given, *added)}
    for missing in sorted({"c--", "cs-", "--u"} - phases):
        typer.echo(f"note: the file has no bucket of {missing} ({_LACKING[missing]})", err=True)


_LACKING = {
    "c--": "prompts without context",
    "cs-": "prompts that continue in chunks or behind a cached prefix",
    "--u": "decodes, so that no mixed bucket was added",
}


@app.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Table or manifest.")], out: _Out
) -> None:
    """Write a file for VLLM_BUCKETING_FROM_FILE; mixed buckets become one of prompts and one of decodes."""
    with user_errors():
        check_file("--out", out)
        from graphs.bucket_file import from_shape, write_gaudi_buckets

        table = _read(file, CacheConfig.block_size)
        buckets = list(dict.fromkeys(bucket for shape in table for bucket in from_shape(shape)))
        try:
            write_gaudi_buckets(out, buckets, f"exported from {file.name}")
        except OSError as error:
            raise ValueError(f"cannot write {out}: {error.strerror}") from error
    typer.echo(f"{out}: {len(buckets)} entries for {len(table)} buckets")


def _read(file: Path, block_size: int) -> BucketTable:
    from graphs import StepCost
    from graphs.bucket_file import read_table
    from graphs.manifest import is_manifest, read_manifest

    cost = StepCost(block_size=block_size)
    return read_manifest(file).table(cost) if is_manifest(file) else read_table(file, cost)


def _write(out: Path, shapes: Iterable[BatchShape], comment: str) -> None:
    from graphs.bucket_file import write_table

    try:
        write_table(out, shapes, comment)
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror}") from error


def _use(table: BucketTable, recordings: list[Path] | None) -> TableUse | None:
    if not recordings:
        return None
    from graphs.bucket_file import read_shapes
    from graphs.table_edits import TableUse

    return TableUse.of(table, read_shapes(*recordings))


def _summary(table: BucketTable) -> str:
    phases = Counter(str(shape.phase) for shape in table)
    listed = ", ".join(f"{count} of {phase}" for phase, count in sorted(phases.items()))
    planned = "" if table.planned_padding is None else f"; {table.planned_padding}"
    return f"{len(table)} buckets: {listed}{planned}"


def _padding(use: TableUse) -> str:
    return (
        f"{use.num_steps:,} recorded steps, {use.num_missed:,} without a bucket; padding {use.mean:.1%} in "
        f"the mean, {use.worst:.0%} at worst, by relative cost"
    )


def _use_fields(use: TableUse) -> dict[str, Any]:
    return {
        "num_steps": use.num_steps,
        "num_missed": use.num_missed,
        "mean": use.mean,
        "worst": use.worst,
    }


def _fields(table: BucketTable, use: TableUse | None) -> dict[str, Any]:
    buckets = [
        {
            "bucket": str(shape),
            "cost": table.cost(shape),
            **({} if use is None else {"num_steps": use.counts.get(shape, 0)}),
        }
        for shape in table.by_cost
    ]
    return {"buckets": buckets, **({} if use is None else {"padding": _use_fields(use)})}


def _bucket_table(table: BucketTable, use: TableUse | None) -> Any:
    from rich.table import Table

    shown = Table(box=None, padding=(0, 2, 0, 0))
    names = ["phase", "query tokens", "shared blocks", "unique blocks", "logit rows", "cost"]
    for name in names if use is None else [*names, "steps"]:
        shown.add_column(name, justify="left" if name == "phase" else "right")
    least = table.cost(table.by_cost[0])
    for shape in table.by_cost:
        cells = [
            str(shape.phase),
            *(f"{size:,}" for size in shape.levels[3:]),
            f"{table.cost(shape) / least:.2f}",
        ]
        shown.add_row(*cells, *([] if use is None else [f"{use.counts.get(shape, 0):,}"]))
    return shown
