"""A predicted time or rate, and the range in which it is expected to lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpu_duo.cost.fitted import FITTED
from hpu_duo.cost.hardware import Hardware
from hpu_duo.cost.roofline import predict_seconds
from hpu_duo.cost.work import Work


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

    def rate(self, num: int) -> Prediction:
        """Return the rate, per second, of ``num`` items that take this time together."""
        return Prediction(num / self.value, num / self.high, num / self.low)

    @property
    def range(self) -> tuple[float, float]:
        """The bounds."""
        return self.low, self.high
