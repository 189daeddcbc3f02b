"""Columns of ``hpu-duo capacity`` and ``plan`` for requests on the host and on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from hpu_duo.cli.options import option_in
from hpu_duo.cli.terminal import parse_rate

if TYPE_CHECKING:
    from hpu_duo.planning import Capacity, CapacityPoint

_option = option_in("Offloading")
_GIB = 1 << 30


class Tier(NamedTuple):
    """A tier of the KV cache behind the devices.

    Attributes:
        name: host or disk.
        num_bytes: that it stores.
        byte_s: seconds of a byte from there to the devices.
        binds: the slowest part of that way.
    """

    name: str
    num_bytes: int
    byte_s: float
    binds: str

    def num_requests(self, point: CapacityPoint) -> int:
        """Return how many requests of a context it stores."""
        return int(self.num_bytes // point.bytes_per_request)

    def seconds(self, point: CapacityPoint) -> float:
        """Return the time to bring the context of one back."""
        return point.bytes_per_request * self.byte_s

    def pays(self, point: CapacityPoint) -> bool:
        """Whether that is predicted to be faster than computing it."""
        return point.first_token_s is None or self.seconds(point) < point.first_token_s

    def fields(self, found: Capacity) -> list[dict[str, Any]]:
        """Return the columns as JSON values, one for each context."""
        return [
            {
                "context": point.context,
                "num_requests": self.num_requests(point),
                "num_tokens": self.num_requests(point) * point.context,
                "seconds_back": self.seconds(point),
                "binds": self.binds,
                "is_faster_than_computing": self.pays(point),
            }
            for point in found.points
        ]

    def cells(self) -> tuple[tuple[str, Callable[[CapacityPoint], str]], ...]:
        """Return titles and cells of its tables."""
        return (
            (f"Tokens that fit on the {self.name}", lambda point: f"{self._num_tokens(point):,}"),
            (f"Seconds to bring a context back from the {self.name}; binds: {self.binds}", self._time),
        )

    def _num_tokens(self, point: CapacityPoint) -> int:
        return self.num_requests(point) * point.context

    def _time(self, point: CapacityPoint) -> str:
        return f"{self.seconds(point):,.3g}" + ("" if self.pays(point) else ", computed faster")


def add_fields(fields: dict[str, Any], tiers: Sequence[Tier], found: Sequence[Capacity]) -> None:
    """Add the columns of tiers to the JSON values of ``report_fields``."""
    for tier in tiers:
        for one, each in zip(fields["capacities"], found):
            one[tier.name] = tier.fields(each)


@dataclass(frozen=True)
class TierOptions:
    """Options of tiers behind the devices."""

    kv_offloading_size: Annotated[
        float | None, _option("GiB of host memory for keys and values.", metavar="GIB", show_default="none")
    ] = None
    kv_offloading_disk_size: Annotated[
        float | None, _option("GiB of a disk for keys and values.", metavar="GIB", show_default="none")
    ] = None
    link: Annotated[
        str, _option("Bytes a second from the host to each device; doctor --rates measures.", metavar="RATE")
    ] = "32GB/s"
    disk_rate: Annotated[
        str, _option("Bytes a second that the disk is read with; doctor --rates measures.", metavar="RATE")
    ] = "3GB/s"

    def tiers(self, num_devices: int) -> tuple[Tier, ...]:
        """Return the tiers of devices that share a model.

        Raises:
            ValueError: a size is not above 0, or a rate is none.
        """
        link, disk = parse_rate("--link", self.link) * num_devices, parse_rate("--disk-rate", self.disk_rate)
        found = []
        for name, size, byte_s, binds in (
            ("host", self.kv_offloading_size, 1 / link, "link"),
            ("disk", self.kv_offloading_disk_size, 1 / link + 1 / disk, "disk" if disk < link else "link"),
        ):
            if size is None:
                continue
            if not 0 < size < math.inf:
                raise ValueError(f"expected sizes of offloading in GiB above 0, got {size}")
            found.append(Tier(name, int(size * _GIB), byte_s, binds))
        return tuple(found)
