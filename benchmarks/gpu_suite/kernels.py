"""The parts alone, against what others run for the same attention."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from benchmarks.gpu_suite.budget_cases import make_budget_cases
from benchmarks.gpu_suite.clock import Clock
from benchmarks.gpu_suite.format_cases import SECTION, make_format_cases
from benchmarks.gpu_suite.kernel_cases import Case, Result, Weighed, make_cases
from benchmarks.gpu_suite.results import Key, Point, Results
from benchmarks.gpu_suite.rivals import rivals
from benchmarks.gpu_suite.shapes import Sizes
from kernels_ref import Partial, normalise

TOLERANCE = 0.05
"""Largest error of an output, as a share of the largest output: rounding of half precision, not a bug."""
_RIVALS_CANNOT = (ImportError, OSError, ValueError, TypeError, AssertionError)
"""Errors by which other packages, besides ours, say that they cannot do or build something here."""


def measure_kernels(clock: Clock, sizes: Sizes, dtype: torch.dtype, results: Results) -> None:
    """Time every implementation of every case that has not been timed yet.

    A result that is off by more than ``TOLERANCE`` is noted as wrong, and not timed.
    """
    for case in make_cases(sizes, dtype, clock.device):
        measure_case(case, clock, results)


def measure_budget(clock: Clock, sizes: Sizes, dtype: torch.dtype, results: Results) -> None:
    """Time heads with a budget and what they stand against, as ``measure_kernels`` does."""
    for case in make_budget_cases(sizes, dtype, clock.device):
        measure_case(case, clock, results, "budget")


def measure_formats(clock: Clock, sizes: Sizes, dtype: torch.dtype, results: Results) -> None:
    """Time decodes against each format of keys and values, as ``measure_kernels`` does."""
    for case in make_format_cases(sizes, dtype, clock.device):
        measure_case(case, clock, results, SECTION)


def measure_case(case: Case, clock: Clock, results: Results, section: str = "kernels") -> None:
    """Time the implementations of one case that have not been timed yet."""
    works: dict[str, Callable[[], torch.Tensor | Result] | str] = {**case.ours, **case.notes}
    if case.dense is not None:
        works |= rivals(case.dense)
    expected: torch.Tensor | None = None
    for system, work in works.items():
        key = Key(section, case.name, system)
        if results.is_measured(key):
            continue
        if isinstance(work, str):
            results.add(Point(key, note=work))
            continue
        if expected is None:
            expected = _outputs(next(iter(case.ours.values()))())
        cannot = _cannot() if system in case.ours else (*_cannot(), *_RIVALS_CANNOT)
        results.add(_measure(key, work, expected, case, clock, cannot))


def _cannot() -> tuple[type[Exception], ...]:
    """Errors of torch and Triton when something cannot be compiled or run."""
    if find_spec("triton") is None:
        return (RuntimeError,)
    from triton.errors import TritonError

    return (RuntimeError, TritonError)


def _measure(
    key: Key,
    work: Callable[[], torch.Tensor | Result],
    expected: torch.Tensor,
    case: Case,
    clock: Clock,
    cannot: tuple[type[Exception], ...],
) -> Point:
    try:
        error = float((_outputs(work()) - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCE:
            return Point(key, note=f"wrong result: off by {error:.3g} of the largest output")
        timing = clock.time(work)
    except torch.OutOfMemoryError:
        return Point(key, note="out of memory")
    except cannot as problem:
        # The first line names it; some have none.
        return Point(key, note=next(iter(str(problem).strip().splitlines()), type(problem).__name__))
    values = {**timing.values(), "bytes": case.num_bytes, "flops": case.flops, "error": error}
    return Point(key, {**values, "chosen": float(key.system == case.chosen)})


def _outputs(result: torch.Tensor | Result) -> torch.Tensor:
    """Attention outputs as float32 ``[Q, H, D]``, whoever computed them; with weights a list of numbers."""
    if isinstance(result, Weighed):
        outputs = [] if result.partial is None else [_outputs(result.partial)]
        return torch.cat([each.flatten() for each in (*outputs, result.mass)])
    if isinstance(result, Partial):
        return normalise(result, torch.float32).flatten(1, 2)
    return result[0].transpose(0, 1).float()
