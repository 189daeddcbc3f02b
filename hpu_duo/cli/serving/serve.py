"""``hpu-duo serve``: the OpenAI API around a model."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from hpu_duo.cli import options as opt
from hpu_duo.cli.options import Only, grouped, load_cold
from hpu_duo.cli.serving.options import (
    CallOptions,
    ListeningOptions,
    ObservabilityOptions,
    ProfileOptions,
    Served,
    ServedReplicas,
)
from hpu_duo.cli.terminal import INTERRUPTED, user_errors
from hpu_duo.config.overrides import EngineOverrides
from hpu_duo.extras import install_command

if TYPE_CHECKING:
    from hpu_duo.fleet.replicas.front import Front
    from hpu_duo.server.http.listening import Connections, Ending, Tls

_FAILED = 1


def end_with_stdin() -> None:
    """Stop this process as SIGTERM does when standard input ends, because whoever started it is gone."""

    def wait() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="ends-with-stdin", daemon=True).start()


def exit_as(ending: Ending, failure: str, *, is_left_behind: bool = False) -> NoReturn:
    """Tell of the end of a server, and end the process with a code that is not 0 unless a signal ended it.

    Args:
        failure: tells why it has ended by itself.
        is_left_behind: whether a thread computes that could not be stopped. Exit functions, such as those
            that wait for ranks, might wait for it.
    """
    from hpu_duo.device.processes import leave

    leave(_code_of(ending, failure), calls_exit_functions=not is_left_behind)


def _code_of(ending: Ending, failure: str) -> int:
    from hpu_duo.server.http.listening import is_interrupt

    if ending.signal_number is None:
        typer.echo(f"hpu-duo: {failure}", err=True)
        return _FAILED
    if is_interrupt(ending):
        return INTERRUPTED
    if not ending.is_drained:
        typer.echo("hpu-duo: stopped before every call had ended", err=True)
    return 0


def serve_replicas(
    front: Front, bound: socket.socket, connections: Connections, tls: Tls | None, host: str
) -> None:
    """Serve with replicas until a signal comes.

    Args:
        bound: listens for callers.
        connections: limits theirs.
        host: for the address that is printed.
    """
    from hpu_duo.fleet.replicas.app import create_front_app
    from hpu_duo.server.http.listening import listen

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    place = f"{'http' if tls is None else 'https'}://{host}:{bound.getsockname()[1]}"
    config = front.config

    def tell() -> None:
        names = ", ".join(config.server.model_names)
        typer.echo(
            f"hpu-duo: {config.num_replicas} replicas of {names} behind {place}, by {config.router}", err=True
        )

    ending = listen(
        create_front_app(front), front, bound, connections, tls, tell, config.server.flush_seconds
    )
    exit_as(ending, "no replica could be started; see above")


_NEEDED = ("fastapi", "uvicorn", "openai", "prometheus_client")


@grouped
def serve(
    *,
    model: opt.Model = None,
    listening: ListeningOptions,
    replicated: ServedReplicas,
    calls: CallOptions,
    served: Served,
    observability: ObservabilityOptions,
    profiling: ProfileOptions,
    warm_up: Annotated[
        bool,
        typer.Option(
            "--warmup/--no-warmup",
            help="Capture every shape before requests are accepted, if steps are captured.",
        ),
    ] = True,
    seed: opt.Seed = 0,
    engine: Annotated[EngineOverrides, Only(graphs="auto", max_num_seqs=None)],
) -> None:
    """Serve a model over HTTP, with the API of OpenAI: completions, chats, streams, tools.

    It listens once the model is loaded; /health is 503 until it has warmed up. SIGTERM and Ctrl-C let calls
    end, a second one ends them at once.
    """
    with user_errors():
        if missing := [name for name in _NEEDED if find_spec(name) is None]:
            raise ValueError(
                f"expected the packages of the extra serve: {install_command('serve')}; missing: "
                f"{', '.join(missing)}"
            )
        if engine.get("rank_launcher") != "own":
            from hpu_duo.device.ranks import follows_another

            if replicated.replicas is not None:
                raise ValueError("--replicas start their own processes: expected --rank-launcher own with it")
            if follows_another():
                # Ends the process with rank 0, which alone listens.
                load_cold(model, engine, seed=seed)
        config = calls.config(model, served, listening)
        tls, connections = listening.tls, listening.connections
        profiling.check()
        replicated.check()
        # A port that is taken is reported before weights are read.
        bound = listening.bound()
        if replicated.replicas is not None:
            front = replicated.front(config, str(engine.get("device")), engine.get("tensor_parallel_size", 1))
    if replicated.replicas is not None:
        serve_replicas(front, bound, connections, tls, listening.host)
        return
    with user_errors():
        log, tracing = observability.request_log(), observability.tracing()
        told = [one for one in (log, tracing) if one is not None]
        loaded = load_cold(model, engine, seed=seed)
        profiler = profiling.profiler(loaded.engine.runner.runtime.name)
        loaded.engine.profiler = profiler
        from hpu_duo.server.http.listening import listen
        from hpu_duo.server.http.routes import create_app
        from hpu_duo.server.service import Service

        service = Service(loaded, config, tuple(one.add for one in told))
        if log is not None:
            log.on_lost = service.metrics.lost_line
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    typer.echo(f"hpu-duo: {loaded.stats().resolved.computation}", err=True)
    for note in loaded.engine.notes:
        typer.echo(f"note: {note}", err=True)
    captures = warm_up and loaded.engine.runner.executor.uses_table
    app = create_app(service, warm_up=captures)
    place = f"{'http' if tls is None else 'https'}://{listening.host}:{bound.getsockname()[1]}"

    def tell() -> None:
        names = ", ".join(config.model_names)
        typer.echo(f"hpu-duo: serving {names} at {place}{', warming up' if captures else ''}", err=True)

    if listening.ends_with_stdin:
        end_with_stdin()
    ending = listen(app, service, bound, connections, tls, tell, config.flush_seconds)
    for one in told:
        one.close()
    if profiler is not None and profiler.trace is None:
        typer.echo(
            f"hpu-duo: no profile was written: {profiler.remaining} more steps would have been needed",
            err=True,
        )
    exit_as(ending, "the engine has failed; see above", is_left_behind=service.is_left_behind)
