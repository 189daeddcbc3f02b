"""Predicted times with the range in which they are expected to lie, and the warm-up of a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpu_duo.planning.engine_work import SECONDS_PER_GRAPH, TRACE_S_PER_OPERATOR, BucketGraphs, graph_scale
from hpu_duo.planning.model import Format, Hardware
from hpu_duo.planning.roofline import FITTED, predict_seconds
from hpu_duo.planning.work import Work

ERROR_FACTORS = {Format.FP8: 1.37, Format.BF16: 1.9}
"""The most that a predicted time is off by, either way, by format, rounded up.

fp8: the worst of the held-out rows. bf16: no row of it is held out, so it is treated as unseen: the worst of
all rows when the other models alone were fitted (``worst_unseen``).
"""


@dataclass(frozen=True)
class Prediction:
    """A prediction: ``low <= value <= high``.

    For a time, ``value`` assumes that everything between matrix products is fused, as in the software of the
    published figures. ``low`` is ``value`` divided by the largest error of the model. ``high`` assumes that
    nothing is fused, as ``hpu-duo audit`` counts, and is multiplied by that error. For a rate, the two bounds
    change places.
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, work: Work, hardware: Hardware, num_devices: int, error_factor: float) -> Prediction:
        """Predict the seconds of a step.

        Args:
            error_factor: 1 or more.

        Raises:
            ValueError: one box has fewer devices.
        """
        fused = predict_seconds(work.fused, hardware, num_devices, FITTED).total
        unfused = predict_seconds(work, hardware, num_devices, FITTED).total
        return cls(fused, fused / error_factor, unfused * error_factor)

    @classmethod
    def total(cls, parts: Iterable[Prediction]) -> Prediction:
        """Seconds of steps that follow each other."""
        values = [(each.value, each.low, each.high) for each in parts]
        return cls(*(sum(column) for column in zip(*values)))

    def at_least(self, seconds: float) -> Prediction:
        """Return the time of what waits for something else that takes so long."""
        return Prediction(*(max(each, seconds) for each in (self.value, self.low, self.high)))

    def rate(self, num: int) -> Prediction:
        """Return the rate, per second, of ``num`` items in this total time."""
        return Prediction(num / self.value, num / self.high, num / self.low)

    @property
    def range(self) -> tuple[float, float]:
        """The bounds."""
        return self.low, self.high


@dataclass(frozen=True)
class WarmUp:
    """Graphs to capture, and their seconds.

    Seconds are proportional to the operators of layers: there are no published times of small graphs.

    Attributes:
        num_graphs: buckets of the table, or the most that one may have.
        num_layer_kinds: kinds of layers, each of which is compiled for every bucket.
        recipes: compilations, if all buckets were like the one with fewest and like the one with most; the
            same number twice if the table is known.
        operators: of a layer, in the bucket with fewest and in that with most.
        trace_s: seconds in which torch traces them, low and high.
        low_s, high_s: seconds of the warm-up, tracing included.
        is_bound: whether the table has not been planned, so that ``num_graphs`` is its budget.
    """

    num_graphs: int
    num_layer_kinds: int
    recipes: tuple[int, int]
    operators: tuple[int, int]
    trace_s: tuple[float, float]
    low_s: float
    high_s: float
    is_bound: bool

    @classmethod
    def of(cls, graphs: Iterable[BucketGraphs], num_layer_kinds: int) -> WarmUp:
        """Estimate the warm-up of a table.

        Args:
            graphs: of each bucket.

        Raises:
            ValueError: no bucket.
        """
        each = list(graphs)
        if not each:
            raise ValueError("expected a bucket to warm up, got none")
        return cls._sum(num_layer_kinds, each, each, is_bound=False)

    @classmethod
    def within(
        cls, num_graphs: int, num_layer_kinds: int, fewest: BucketGraphs, most: BucketGraphs
    ) -> WarmUp:
        """Bound the warm-up of a table that has not been planned: all its layers are small, or all large."""
        return cls._sum(num_layer_kinds, [fewest] * num_graphs, [most] * num_graphs, is_bound=True)

    @classmethod
    def _sum(
        cls, num_kinds: int, few: list[BucketGraphs], many: list[BucketGraphs], *, is_bound: bool
    ) -> WarmUp:
        traced = tuple(
            num_kinds * TRACE_S_PER_OPERATOR * sum(each.operators for each in graphs)
            for graphs in (few, many)
        )
        compiled = tuple(
            num_kinds * seconds * sum(graph_scale(each.operators) for each in graphs)
            for seconds, graphs in zip(SECONDS_PER_GRAPH, (few, many))
        )
        recipes = tuple(sum(each.num_recipes for each in graphs) for graphs in (few, many))
        return cls(
            len(few),
            num_kinds,
            (recipes[0], recipes[1]),
            (round(min(each.operators for each in few)), round(max(each.operators for each in many))),
            (traced[0], traced[1]),
            compiled[0] + traced[0],
            compiled[1] + traced[1],
            is_bound,
        )
