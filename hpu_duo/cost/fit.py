"""Efficiencies fitted to published speeds, and the errors of the model on other published speeds.

    python -m hpu_duo.cost.fit selftest.json [...]

fits them again with rows that ``hpu-duo selftest`` measured.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
from numpy.typing import NDArray

from hpu_duo.cost.published import PublishedRow
from hpu_duo.cost.roofline import Efficiency, predict_seconds, roof_seconds

_START = Efficiency(compute=0.5, memory=0.5, link=0.5, launch_s=0.2e-6)
_CEILING = Efficiency(compute=1.0, memory=1.0, link=1.0, launch_s=1e-5)
_FLOOR = Efficiency(compute=0.01, memory=0.01, link=0.01, launch_s=1e-11)
_KNEE = 0.1
"""Errors of a logarithm beyond this value count linearly, smaller ones by their square."""
_SMALLEST_STEP = 1e-5


def fit(rows: Sequence[PublishedRow]) -> Efficiency:
    """Fit the efficiencies with which the roofline is closest to the published times.

    The mean pseudo-Huber loss of log(predicted / published) is minimised, so that outliers count little, over
    efficiencies between 1 % and 100 %, by a pattern search in the logarithms, which has no random part.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("expected at least one published row to fit, got none")
    roofs = np.array([astuple(roof_seconds(row.work(), row.hardware, row.num_devices)) for row in rows])
    published = np.log([row.seconds for row in rows])
    low, high = np.log(astuple(_FLOOR)), np.log(astuple(_CEILING))

    def loss(point: NDArray[np.float64]) -> float:
        error = np.log(roofs @ _slowdown(point)) - published
        return float(np.mean(np.sqrt(1.0 + (error / _KNEE) ** 2) - 1.0))

    point = np.log(astuple(_START))
    best, step = loss(point), 0.5
    while step > _SMALLEST_STEP:
        moves = [np.clip(point + sign * step * axis, low, high) for axis in np.eye(4) for sign in (1, -1)]
        losses = [loss(move) for move in moves]
        if min(losses) < best:
            best = min(losses)
            point = moves[losses.index(best)]
        else:
            step /= 2
    return Efficiency(*np.exp(point).tolist())


def _slowdown(point: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds per second at the roof of compute, memory and link, and seconds of an operator."""
    return np.exp(point * np.array([-1.0, -1.0, -1.0, 1.0]))


def relative_error(row: PublishedRow, efficiency: Efficiency) -> float:
    """Relative error of the prediction of a published figure: above 0 when it is too high.

    The figure is tokens per second, or for latencies milliseconds.
    """
    predicted = predict_seconds(row.work(), row.hardware, row.num_devices, efficiency).total
    return predicted / row.seconds - 1.0 if row.tokens_per_s is None else row.seconds / predicted - 1.0


def median_error(rows: Sequence[PublishedRow], efficiency: Efficiency) -> float:
    """Median of the absolute relative errors; NaN without rows."""
    if not rows:
        return math.nan
    return float(np.median([abs(relative_error(row, efficiency)) for row in rows]))


def leave_one_model_out(rows: Sequence[PublishedRow]) -> dict[str, float]:
    """Median absolute error on each model's rows, when all rows of the other models were fitted."""
    errors: dict[str, float] = {}
    for name in sorted({row.model.name for row in rows}):
        efficiency = fit([row for row in rows if row.model.name != name])
        errors[name] = median_error([row for row in rows if row.model.name == name], efficiency)
    return errors


def worst_factor(rows: Sequence[PublishedRow], efficiency: Efficiency) -> float:
    """The most that a prediction of these rows is too high or too low by, as a factor of 1 or more."""
    errors = (1.0 + relative_error(row, efficiency) for row in rows)
    return max((max(error, 1.0 / error) for error in errors), default=1.0)


def worst_unseen(rows: Sequence[PublishedRow]) -> float:
    """``worst_factor`` over all rows, each predicted by a fit of the rows of other models."""
    factors = [1.0]
    for name in sorted({row.model.name for row in rows}):
        efficiency = fit([row for row in rows if row.model.name != name])
        factors.append(worst_factor([row for row in rows if row.model.name == name], efficiency))
    return max(factors)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit to the published rows and those of files, and print what changes."""
    # The constants in use are the result of this module.
    from hpu_duo.cost.fitted import FITTED
    from hpu_duo.cost.measured import read_rows
    from hpu_duo.cost.published import published_rows

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("files", nargs="+", help="JSON reports of hpu-duo selftest")
    measured: list[PublishedRow] = []
    try:
        for row in [row for file in parser.parse_args(arguments).files for row in read_rows(file)]:
            try:
                measured.append(row.published())
            except ValueError as error:
                print(f"left out: {error}")
    except ValueError as error:
        parser.error(str(error))
    print(f"constants in use: {FITTED}")
    for each in measured:
        off = relative_error(each, FITTED)
        print(
            f"{each.model.name}, {each.batch} x ({each.input_len} + {each.output_len}): predicted {off:+.0%}"
        )
    if measured:
        print(f"fitted with them: {fit([*published_rows(), *measured])}")


if __name__ == "__main__":
    main()
