"""A run of ``hpu-duo identify``, in this process, under torchrun, or in processes that it starts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from transformers.utils import logging

from hpu_duo.cli.heads.views import IdentifyView
from hpu_duo.device import Member, Refused, process_environments, run_processes, usable_name
from hpu_duo.heads import HeadPattern
from hpu_duo.lab.identify import Identification, IdentifyRequest, Method, Workers, joined_workers


class ToldInterruptError(KeyboardInterrupt):
    """An interrupt whose message with the progress of the run is printed already."""


def identifier(
    request: IdentifyRequest, threads: int | None, num_processes: int | None
) -> Callable[[], HeadPattern | None]:
    """Return a function that identifies; it returns the pattern in the first process, None in others.

    The function raises what ``identify`` raises and, with processes of its own, a ``WorkerError``.

    Args:
        threads: of each process, on the CPU; None = torch's choice.
        num_processes: to start; None = this one, alone or as torchrun started it.

    Raises:
        ValueError: there cannot be so many.
    """
    if num_processes is None:
        return partial(identify, None, request, threads)
    if dist.is_torchelastic_launched():
        raise ValueError("torchrun has started the processes already: expected no --num-processes")
    environments = process_environments(usable_name(request.device), num_processes)
    is_optimised = request.method is Method.OPTIMISE
    Workers(0, num_processes).share(request.training.batch_size if is_optimised else request.num_samples)
    return lambda: run_processes(identify, (request, threads), environments)[0]


def identify(member: Member | None, request: IdentifyRequest, threads: int | None) -> HeadPattern | None:
    """Identify in this process, alone or among others; returns the pattern in the first one, else None.

    Raises:
        Refused: the request cannot be carried out.
        KeyboardInterrupt: interrupted; the state of an optimisation has been saved.
    """
    quiet()
    with cpu_set_up(threads), joined_workers(member) as workers:
        with _refusing(ValueError):
            run = Identification(request, workers)
        view = IdentifyView(Console(stderr=True), run.total, is_silent=not workers.is_first)
        # A loss that is not finite is the doing of the type asked for.
        with _refusing(FloatingPointError):
            try:
                for progress in run.run():
                    view.moved(progress)
            except KeyboardInterrupt:
                view.ended()
                run.save_state()
                if workers.is_first:
                    _tell_interrupted(run, request)
                raise ToldInterruptError from None
            finally:
                view.ended()
        run.write()
        return run.pattern() if workers.is_first else None


@contextmanager
def _refusing(kind: type[Exception]) -> Iterator[None]:
    """Turn an error into ``Refused``, one of the user's, in whichever process it is raised."""
    try:
        yield
    except kind as error:
        raise Refused(str(error)) from None


def quiet() -> None:
    """Keep other libraries from the terminal."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".* is in beta and the API may change", category=UserWarning)


@contextmanager
def cpu_set_up(threads: int | None) -> Iterator[None]:
    """Set the number of threads, and flush subnormal numbers to zero: CPUs are many times slower on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if threads is None else threads)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


def _tell_interrupted(run: Identification, request: IdentifyRequest) -> None:
    told = f"hpu-duo: interrupted after {run.num_done} of {run.total} steps"
    if request.method is Method.OPTIMISE:
        told += "; the same command with --resume goes on"
    typer.echo(told, err=True)
