"""Methods of calibration: what is measured of each prompt and layer, and what heads keep by it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hpu_duo.heads.eviction.fastgen import TokenClasses
from hpu_duo.lab.kv_calibration.calibrated import PlannedHead
from hpu_duo.lab.kv_calibration.collect import LayerAttention

PlannedLayers = tuple[tuple[PlannedHead, ...], ...]


class Measurement(ABC):
    """Sums and counts of what has been measured, of layers without a window; no attention."""

    @abstractmethod
    def take(self, layer: int, attention: LayerAttention, classes: TokenClasses | None) -> None:
        """Measure one prompt in one layer, numbered among those that are measured.

        Args:
            classes: of the prompt's tokens, if the method needs them.
        """

    @abstractmethod
    def planned(self, num_sizes: int) -> PlannedLayers:
        """Choose for each head of each measured layer.

        Args:
            num_sizes: most different budgets.
        """


class CalibrationMethod(ABC):
    """Settings of a method, checked."""

    needs_classes: bool

    @property
    @abstractmethod
    def num_queries(self) -> int | None:
        """Last tokens of a prompt whose attention is measured; None for all."""

    @abstractmethod
    def shortest(self, lengths: Sequence[int]) -> int:
        """Tokens that each prompt must have.

        Args:
            lengths: tokens of the prompts.

        Raises:
            ValueError: the method cannot work on such prompts.
        """

    @abstractmethod
    def measurement(self, num_layers: int, lengths: Sequence[int]) -> Measurement:
        """Begin to measure."""
