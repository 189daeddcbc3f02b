"""``hpu-duo replay``: run recorded steps again, and compare their tokens."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from hpu_duo.cli.arguments import options as opt
from hpu_duo.cli.arguments.loading import load_cold, with_own_pattern
from hpu_duo.cli.arguments.options import Only, grouped
from hpu_duo.cli.terminal.errors import user_errors
from hpu_duo.config.overrides import EngineOverrides

if TYPE_CHECKING:
    from hpu_duo.lab.replay import ReplayReport

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
        typer.echo(json.dumps(_fields(report), indent=2))
    else:
        _print(Console(), file, report)
    if report.differences:
        raise typer.Exit(FOUND_DIFFERENCES)


def _fields(report: ReplayReport) -> dict[str, Any]:
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
