"""``hpu-duo bench steps``: times of an engine's steps on this machine, for ``hpu-duo simulate``."""

from __future__ import annotations

import json
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hpu_duo.cli.arguments import options as opt
from hpu_duo.cli.arguments.loading import load_model
from hpu_duo.cli.arguments.options import Only, grouped
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.config.overrides import EngineOverrides
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.lab.simulate.step_times import StepTimes
    from hpu_duo.llm import HPUDuoModel

_Offered = Annotated[
    EngineOverrides,
    Only(
        *(*opt.CUT, *opt.STEP, "max_model_len", "max_num_batched_tokens", "max_chunk_rows", "block_size"),
        *("num_blocks", "kv_cache_bytes", "buckets", "max_captured_tokens", "graph_memory_bytes"),
        "device_memory_utilization",
        max_num_seqs=None,
    ),
]


@grouped
def bench_steps(
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write, for simulate --step-times.")],
    model: opt.Model = None,
    engine: _Offered,
    max_seconds: Annotated[float, typer.Option(help="Time to measure for, behind the warm-up.")] = 120.0,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Time steps of an engine on this machine, for hpu-duo simulate.

    Serves random prompts, one to --max-num-seqs at once, short to --max-model-len, some of them while others
    decode. The machine should do nothing else.
    """
    with user_errors():
        if not max_seconds > 0:
            raise ValueError(f"expected --max-seconds above 0, got {max_seconds}")
        check_file("--out", out)
        from hpu_duo.lab.simulate.measuring import measure_steps

        loaded = load_model(model, engine, seed=seed)
    with user_errors(()):
        loaded.warmup()
        times = measure_steps(
            loaded.engine, max_seconds=max_seconds, seed=seed, description=_description(loaded)
        )
    with user_errors(OSError):
        times.write(out)
    if as_json:
        typer.echo(json.dumps(_fields(times), indent=2))
    else:
        Console().print(_table(times))


def _description(loaded: HPUDuoModel) -> dict[str, Any]:
    resolved = loaded.stats().resolved
    return {
        "model": Path(loaded.engine_config.model.path).name,
        "device": str(resolved.device),
        "machine": platform.processor() or platform.machine(),
        "torch": version("torch"),
        "date": date.today().isoformat(),
    }


def _fields(times: StepTimes) -> dict[str, Any]:
    return {
        "engine": dict(times.engine),
        "num_shapes": len(times.measured),
        "num_steps": sum(one.num_steps for one in times.measured.values()),
        "median_error_of_fit": times.median_error,
    }


def _table(times: StepTimes) -> Table:
    """A line for each phase: shapes, steps, and the range of their times."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("phase", "shapes", "steps", "shortest, ms", "longest, ms"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase in sorted({shape.phase for shape in times.measured}):
        found = [one for shape, one in times.measured.items() if shape.phase == phase]
        medians = [1000 * one.median_s for one in found]
        steps = sum(one.num_steps for one in found)
        table.add_row(
            str(phase), f"{len(found):,}", f"{steps:,}", f"{min(medians):,.2f}", f"{max(medians):,.2f}"
        )
    table.caption = f"shapes not measured: by a fit that is {times.median_error:.0%} off in the median"
    return table
