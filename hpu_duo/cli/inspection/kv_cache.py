"""``hpu-duo kv-cache``: the folder of the KV tier on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hpu_duo.cli.options import Json
from hpu_duo.cli.terminal import show_bytes, user_errors

app = typer.Typer(help="List, verify and purge what --kv-offloading-disk has written.", no_args_is_help=True)
Folder = Annotated[
    Path,
    typer.Argument(metavar="PATH", exists=True, file_okay=False, help="Folder of --kv-offloading-disk."),
]


@dataclass
class _Model:
    """Segments of one model: the first digits of its fingerprint, behind the folder of a rank, and sums."""

    model: str
    num_files: int = 0
    num_bytes: int = 0
    num_records: int = 0
    num_damaged: int = 0


def _models(folder: Path, *, verifies: bool) -> Iterator[_Model]:
    from hpu_duo.kv.tiers.segments import folders_of

    for each in folders_of(folder):
        yield from _models_of(each, "" if each == folder else f"{each.name}/", verifies=verifies)


def _models_of(folder: Path, prefix: str, *, verifies: bool) -> Iterator[_Model]:
    from hpu_duo.kv.tiers.segments import DamagedRecord, read_record, scan, segments_of

    found: dict[str, _Model] = {}
    for segment in segments_of(folder):
        name = prefix + (segment.fingerprint.hex()[:16] if segment.fingerprint else "damaged")
        each = found.setdefault(name, _Model(name))
        each.num_files += 1
        each.num_bytes += segment.num_bytes
        if not segment.fingerprint:
            each.num_damaged += 1
            continue
        for stored in scan(folder, segment.name):
            if stored is None:
                each.num_damaged += 1
                continue
            each.num_records += 1
            if verifies:
                try:
                    read_record(folder, stored)
                except DamagedRecord:
                    each.num_damaged += 1
    yield from found.values()


def _show(models: list[_Model], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in models], indent=2))
        return
    table = Table("model", "files", "size", "records", "damaged")
    for each in models:
        table.add_row(
            each.model,
            str(each.num_files),
            show_bytes(each.num_bytes),
            f"{each.num_records:,}",
            f"{each.num_damaged:,}",
        )
    Console().print(table)


@app.command("list")
def list_(folder: Folder, *, as_json: Json = False) -> None:
    """Print files, bytes and records of each model, by the first digits of its fingerprint."""
    with user_errors(OSError):
        _show(list(_models(folder, verifies=False)), as_json=as_json)


@app.command()
def verify(folder: Folder, *, as_json: Json = False) -> None:
    """Read all records, and compare their checksums; the exit code is 1 if any is damaged."""
    with user_errors(OSError):
        models = list(_models(folder, verifies=True))
    _show(models, as_json=as_json)
    if any(each.num_damaged for each in models):
        raise typer.Exit(1)


@app.command()
def purge(folder: Folder) -> None:
    """Remove all records, but those of models that a process serves now."""
    from hpu_duo.kv.tiers.segments import folders_of

    num_files = num_kept = 0
    with user_errors(OSError):
        for each in folders_of(folder):
            removed, left = _purge(each)
            num_files, num_kept = num_files + removed, num_kept + left
    kept = f", kept {num_kept} of models that are served" if num_kept else ""
    typer.echo(f"removed {num_files} files{kept}")


def _purge(folder: Path) -> tuple[int, int]:
    """Remove the segments that no process writes; returns how many, and how many are left."""
    from hpu_duo.kv.tiers.segments import FolderLock, models_of, segments_of

    num_files = num_kept = 0
    for model in models_of(folder):
        lock = FolderLock(folder, model)
        own = [each for each in segments_of(folder) if each.name.startswith(model)]
        if not lock.acquire():
            num_kept += len(own)
            continue
        for each in own:
            (folder / each.name).unlink()
        num_files += len(own)
        (folder / f"{model}.lock").unlink()
        lock.release()
    return num_files, num_kept
