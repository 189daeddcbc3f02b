"""``hpu-duo bench steps`` and ``replay``: times of steps, and recorded steps once more."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from hpu_duo.cli import options as opt
from hpu_duo.cli.options import Only, grouped, load_cold, load_model, with_own_pattern
from hpu_duo.cli.terminal import user_errors
from hpu_duo.config.overrides import EngineOverrides
from hpu_duo.writable import check_file

if TYPE_CHECKING:
    from hpu_duo.lab.replay import ReplayReport
    from hpu_duo.lab.simulate.step_times import StepTimes
    from hpu_duo.llm import HPUDuoModel

_Offered = Annotated[
    EngineOverrides,
    Only(
        *(
            *opt.CUT,
            *opt.STEP,
            *opt.STORED,
            "max_model_len",
            "max_num_batched_tokens",
            "max_chunk_rows",
            "block_size",
        ),
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
    max_seconds: Annotated[float, typer.Option(help="Time to measure for, after the warm-up.")] = 120.0,
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


FOUND_DIFFERENCES = 1
_MOST_SHOWN = 10


@grouped
def replay(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Steps that --record-steps has written.")],
    model: opt.Model = None,
    dtype: Annotated[str | None, opt.of_setting("dtype", unset="that of the recording")] = None,
    heads: Annotated[EngineOverrides, Only(*opt.CUT)],
    as_json: opt.Json = False,
) -> None:
    """Run recorded steps again, and compare their tokens.

    A step depends on its message, the weights and the steps before, and on nothing else: on the same machine
    the tokens are the same, bit for bit, and the exit code is 0. Everything but the model is loaded as it was
    when the steps were recorded; another model, head pattern, dtype or layout is refused. Tokens that were
    chosen on the host cannot be repeated and are counted.
    """
    with user_errors():
        # Slow to import, and help does not need it.
        from hpu_duo.lab.replay import replay as replay_steps
        from hpu_duo.startup.recorded_steps import options_of, read_log

        log = read_log(file)
        options = options_of(log.origin)
        if dtype is not None:
            options["dtype"] = dtype
        if heads.get("pattern") is not None or opt.is_cut(heads):
            options |= with_own_pattern(model, heads)
        loaded = load_cold(model, cast(EngineOverrides, options))
        report = replay_steps(loaded.engine, loaded.engine_config.model.path, log)
    if as_json:
        typer.echo(json.dumps(_replay_fields(report), indent=2))
    else:
        _print(Console(), file, report)
    if report.differences:
        raise typer.Exit(FOUND_DIFFERENCES)


def _replay_fields(report: ReplayReport) -> dict[str, Any]:
    fields = {**asdict(report), "differences": [each._asdict() for each in report.differences]}
    # The name that readers of the JSON know.
    fields["num_hosted"] = fields.pop("num_host_sampled")
    return fields


def _print(console: Console, file: Path, report: ReplayReport) -> None:
    lines = [f"{report.num_steps:,} steps of {file}, {report.num_tokens:,} tokens compared"]
    lines += [
        f"step {each.step}, row {each.row}: token {each.expected} was recorded, now {each.got}"
        for each in report.differences[:_MOST_SHOWN]
    ]
    if len(report.differences) > _MOST_SHOWN:
        lines.append(f"and {len(report.differences) - _MOST_SHOWN:,} more")
    lines.append(f"{len(report.differences):,} differ" if report.differences else "all are the same")
    if report.num_host_sampled:
        lines.append(f"not replayable: {report.num_host_sampled:,} tokens that were chosen on the host")
    if report.cut is not None:
        lines.append(f"note: {report.cut}")
    lines += [f"note: recorded with {each}" for each in report.versions]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
