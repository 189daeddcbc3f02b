"""Times of steps measured on the machine at hand, and a fit for shapes that were not measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphs import BatchShape, BucketTable, StepLimits
from graphs.atomic_file import replace_file

_FORMAT = "hpu-duo step times 1"
_ENOUGH = 3
"""Steps of a shape from which on their median is taken instead of the fit."""
_ROUNDS = 2000


@dataclass(frozen=True)
class MeasuredShape:
    """Seconds of the steps of one shape: their median, and their number."""

    median_s: float
    num_steps: int

    def __post_init__(self) -> None:
        if not 0 < self.median_s < float("inf") or self.num_steps < 1:
            raise ValueError(f"expected seconds above 0 of at least one step, got {self}")


@dataclass(frozen=True)
class StepTimes:
    """Durations of an engine's steps; called with a shape, it returns the seconds of a step.

    A shape with ``_ENOUGH`` measured steps takes their median. Any other takes a sum of costs above 0, fitted
    to all medians: of a step, of one that has prompts, of tokens, rows, pairs of new tokens, unique blocks,
    and pairs of tokens and shared blocks.

    Attributes:
        limits: of the engine's steps.
        measured: by shape, at least one; shapes are buckets if the engine has a table.
        buckets: the engine's table; empty if it ran every step at its exact shape.
        engine: a description of what was measured: device, model, versions.
    """

    limits: StepLimits
    measured: Mapping[BatchShape, MeasuredShape]
    buckets: tuple[BatchShape, ...] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.measured:
            raise ValueError("expected the times of at least one shape, got none")

    @classmethod
    def of(
        cls,
        steps: Iterable[tuple[BatchShape, float]],
        limits: StepLimits,
        buckets: tuple[BatchShape, ...] = (),
        engine: Mapping[str, Any] | None = None,
    ) -> StepTimes:
        """Make a table of measured steps: pairs of shape and seconds."""
        found: dict[BatchShape, list[float]] = {}
        for shape, seconds in steps:
            found.setdefault(shape, []).append(seconds)
        medians = {
            shape: MeasuredShape(float(np.median(seconds)), len(seconds)) for shape, seconds in found.items()
        }
        return cls(limits, medians, buckets, engine or {})

    @property
    def table(self) -> BucketTable | None:
        """The engine's buckets; None if it had none."""
        return BucketTable(self.buckets) if self.buckets else None

    def __call__(self, shape: BatchShape) -> float:
        """Return the seconds of a step."""
        known = self.measured.get(shape)
        if known is not None and known.num_steps >= _ENOUGH:
            return known.median_s
        return self.fitted(shape)

    def fitted(self, shape: BatchShape) -> float:
        """Return the seconds of a step by the fit alone."""
        return sum(weight * value for weight, value in zip(self._weights, _features(shape)))

    @cached_property
    def median_error(self) -> float:
        """Median of the relative errors of the fit on the shapes it was made of."""
        errors = [abs(self.fitted(shape) / one.median_s - 1) for shape, one in self.measured.items()]
        return float(np.median(errors))

    @cached_property
    def _weights(self) -> tuple[float, ...]:
        rows = np.array([_features(shape) for shape in self.measured], dtype=np.float64)
        seconds = np.array([one.median_s for one in self.measured.values()])
        counts = np.sqrt([min(one.num_steps, _ENOUGH) for one in self.measured.values()])
        # Relative errors count: a short step may be off by as small a share as a long one.
        return tuple(_fit_above_zero(rows / seconds[:, None] * counts[:, None], counts).tolist())

    def write(self, path: Path) -> None:
        """Write the table; OSError if that is not possible."""
        fields = {
            "format": _FORMAT,
            "engine": dict(self.engine),
            "limits": asdict(self.limits),
            "buckets": list(map(str, self.buckets)),
            "steps": {
                str(shape): {"median_s": one.median_s, "num_steps": one.num_steps}
                for shape, one in sorted(self.measured.items())
            },
        }
        replace_file(path, json.dumps(fields, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> StepTimes:
        """Read what ``write`` wrote.

        Raises:
            ValueError: the file cannot be read, or holds something else.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields["format"] != _FORMAT:
                raise ValueError(f"its format is {fields['format']!r}")
            return cls(
                limits=StepLimits(**fields["limits"]),
                measured={
                    BatchShape.parse(shape): MeasuredShape(**one) for shape, one in fields["steps"].items()
                },
                buckets=tuple(map(BatchShape.parse, fields["buckets"])),
                engine=fields["engine"],
            )
        except OSError as error:
            raise ValueError(f"cannot read the step times {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"expected step times in {path}, as hpu-duo bench steps writes them: {error}"
            ) from error


def _features(shape: BatchShape) -> tuple[float, ...]:
    """The counts that a step's time is a sum of."""
    tokens, prompts = shape.query_len, float(shape.phase.causal)
    return (
        1.0,
        prompts,
        float(tokens),
        float(shape.num_logits),
        prompts * tokens * tokens,
        float(shape.num_unique_blocks),
        float(tokens * shape.num_shared_blocks),
    )


def _fit_above_zero(rows: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights of columns, none below 0, with the least squared error (coordinate descent)."""
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    products, aims = (rows / scale).T @ (rows / scale), (rows / scale).T @ wanted
    weights = np.zeros(len(scale))
    for _ in range(_ROUNDS):
        for column in range(len(scale)):
            if products[column, column]:
                slope = products[column] @ weights - aims[column]
                weights[column] = max(0.0, weights[column] - slope / products[column, column])
    return weights / scale
