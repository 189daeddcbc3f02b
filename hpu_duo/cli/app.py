"""The commands by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpu_duo import __version__
from hpu_duo.cli.evaluation.eval import eval_app
from hpu_duo.cli.heads.measure import calibrate, identify
from hpu_duo.cli.heads.pattern import app as pattern_app
from hpu_duo.cli.inspection.audit import audit
from hpu_duo.cli.inspection.kv_cache import app as kv_cache_app
from hpu_duo.cli.inspection.machine import doctor, selftest
from hpu_duo.cli.inspection.quantise import quantise
from hpu_duo.cli.inspection.show_kept import show_kept
from hpu_duo.cli.inspection.steps import bench_steps, replay
from hpu_duo.cli.options import ManyValues, refuse_empty_paths
from hpu_duo.cli.planning.plan import capacity, plan
from hpu_duo.cli.planning.plan_offload import plan_offload
from hpu_duo.cli.planning.simulate import simulate
from hpu_duo.cli.planning.table import app as table_app
from hpu_duo.cli.planning.train_ranker import train_ranker
from hpu_duo.cli.planning.warmup import warmup
from hpu_duo.cli.serving.bench import bench_app
from hpu_duo.cli.serving.options import plug_in
from hpu_duo.cli.serving.serve import serve
from hpu_duo.cli.terminal import delivered
from hpu_duo.cli.text.generate import generate
from hpu_duo.cli.text.passkey import passkey

if TYPE_CHECKING:
    from hpu_duo.lab.step_profiler import StepProfiler


def _dashes(name: str) -> str:
    return name.replace("_", "-")


app = typer.Typer(
    name="hpu-duo",
    help="LLM inference with static shapes for Intel Gaudi and long contexts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # --max_new_tokens is the same as --max-new-tokens, as other tools have it.
    context_settings={"token_normalize_func": _dashes},
)
app.command(cls=ManyValues)(generate)
app.command(cls=ManyValues)(serve)
app.command(cls=ManyValues)(passkey)
app.command(cls=ManyValues)(doctor)
app.command()(selftest)
app.command(cls=ManyValues)(capacity)
app.command(cls=ManyValues)(plan)
app.command()(plan_offload)
app.command(cls=ManyValues)(simulate)
app.command(cls=ManyValues)(warmup)
app.command()(replay)
app.command()(train_ranker)
app.command()(quantise)
app.command(cls=ManyValues)(identify)
app.command(cls=ManyValues)(calibrate)
app.add_typer(pattern_app, name="pattern")
app.add_typer(table_app, name="table")
app.add_typer(kv_cache_app, name="kv-cache")
app.command(cls=ManyValues)(audit)
app.command()(show_kept)
app.add_typer(eval_app, name="eval")
bench_app.command(name="steps", cls=ManyValues)(bench_steps)
app.add_typer(bench_app, name="bench")
refuse_empty_paths(app)


def _profiler(device: str, directory: Path, num_steps: int, num_skipped: int) -> StepProfiler:
    from hpu_duo.lab.step_profiler import StepProfiler

    return StepProfiler(device, directory, num_steps, num_skipped)


plug_in(_profiler)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"hpu-duo {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """LLM inference with static shapes for Intel Gaudi and long contexts."""


def main() -> None:
    """Entry point of the ``hpu-duo`` script."""
    sys.exit(delivered(app))
