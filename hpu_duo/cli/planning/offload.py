"""Columns of ``hpu-duo capacity`` and ``plan`` for requests and weights on the host and on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from hpu_duo.cli.options import of_setting, option_in
from hpu_duo.cli.terminal import parse_rate
from hpu_duo.config.engine import ModelConfig
from hpu_duo.config.limits import check_cpu_offload

if TYPE_CHECKING:
    from hpu_duo.planning import Capacity, CapacityPoint, ModelSize, Serving
    from hpu_duo.planning.serving import OffloadedLayers

_PANEL = "Offloading"
_option = option_in(_PANEL)
_GIB = 1 << 30
_OF_WEIGHTS = ("cpu_offload_gb", "offload_policy", "offload_prefetch_step")


class Tier(NamedTuple):
    """A tier of the KV cache behind the devices.

    Attributes:
        name: host or disk.
        num_bytes: that it stores.
        byte_s: seconds of a byte from there to the devices.
        slowest: the same of the slowest part of that way alone, which bounds many contexts.
        binds: that part.
        answer: tokens of an answer, see ``tokens_per_s``.
    """

    name: str
    num_bytes: int
    byte_s: float
    slowest: float
    binds: str
    answer: int

    def num_requests(self, point: CapacityPoint) -> int:
        """Return how many requests of a context it stores."""
        return int(self.num_bytes // point.bytes_per_request)

    def seconds(self, point: CapacityPoint) -> float:
        """Return the time to bring the context of one back."""
        return point.bytes_per_request * self.byte_s

    def pays(self, point: CapacityPoint) -> bool:
        """Whether that is predicted to be faster than computing it."""
        return point.first_token_s is None or self.seconds(point) < point.first_token_s

    def tokens_per_s(self, point: CapacityPoint) -> tuple[float, str] | None:
        """Return the tokens a second of requests whose contexts all come back from here, and what binds.

        Copies run beside decodes: of the requests that fit, one is on its way, and the others decode. One
        that is alone decodes when it is back. None where no request fits.
        """
        if point.tokens_per_s is None:
            return None
        if point.num_running == 1:
            return self.answer / (self.seconds(point) + self.answer / point.tokens_per_s), self.binds
        back = self.answer / (point.bytes_per_request * self.slowest)
        decoded = point.tokens_per_s * (point.num_running - 1) / point.num_running
        return min((decoded, "device"), (back, self.binds))

    def computed_tokens_per_s(self, point: CapacityPoint) -> float | None:
        """Return the same where each context is computed instead, in front of its decodes."""
        if point.tokens_per_s is None or point.first_token_s is None:
            return None
        return self.answer / (point.first_token_s + self.answer / point.tokens_per_s)

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
                **self._speed(point),
            }
            for point in found.points
        ]

    def _speed(self, point: CapacityPoint) -> dict[str, Any]:
        tokens_per_s, binds = self.tokens_per_s(point) or (None, None)
        computed = self.computed_tokens_per_s(point)
        return {
            "answer_tokens": self.answer,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_bound_by": binds,
            "tokens_per_s_computed": computed,
        }

    def cells(self) -> tuple[tuple[str, Callable[[CapacityPoint], str]], ...]:
        """Return titles and cells of its tables."""
        return (
            (f"Tokens that fit on the {self.name}", lambda point: f"{self._num_tokens(point):,}"),
            (f"Seconds to bring a context back from the {self.name}; binds: {self.binds}", self._time),
            (
                f"Tokens/s, {self.answer:,} behind each context: all from the {self.name}, or computed",
                self._both,
            ),
        )

    def _num_tokens(self, point: CapacityPoint) -> int:
        return self.num_requests(point) * point.context

    def _time(self, point: CapacityPoint) -> str:
        return f"{self.seconds(point):,.3g}" + ("" if self.pays(point) else ", computed faster")

    def _both(self, point: CapacityPoint) -> str:
        loaded, computed = self.tokens_per_s(point), self.computed_tokens_per_s(point)
        if loaded is None or computed is None:
            return "-"
        return f"{loaded[0]:,.0f} (binds: {loaded[1]}), {computed:,.0f}"


def add_fields(fields: dict[str, Any], tiers: Sequence[Tier], found: Sequence[Capacity]) -> None:
    """Add the columns of tiers to the JSON values of ``report_fields``."""
    for tier in tiers:
        for one, each in zip(fields["capacities"], found):
            one[tier.name] = tier.fields(each)


@dataclass(frozen=True)
class TierOptions:
    """Options of what lies behind the devices."""

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

    answer_tokens: Annotated[
        int, _option("Tokens of an answer behind a context that comes back, for the tokens/s with a tier.")
    ] = 128

    cpu_offload_gb: Annotated[float, of_setting("cpu_offload_gb", panel=_PANEL)] = 0.0
    offload_policy: Annotated[str | None, of_setting("offload_policy", panel=_PANEL)] = None
    offload_prefetch_step: Annotated[int, of_setting("offload_prefetch_step", panel=_PANEL)] = 1

    def serving(self, model: ModelSize, serving: Serving) -> Serving:
        """Return the devices with the weights of some layers elsewhere.

        Raises:
            ValueError: the policy places something else than weights, an option is out of range, or more lies
                on the host than the weights of all layers.
        """
        # Options of an engine are checked as the engine checks them.
        ModelConfig(path="", **{name: getattr(self, name) for name in _OF_WEIGHTS})
        away = self._layers(model, serving)
        return replace(serving, offloaded=away) if away.number else serving

    def _layers(self, model: ModelSize, serving: Serving) -> OffloadedLayers:
        from hpu_duo.planning.offload import Placement, spread
        from hpu_duo.planning.serving import OffloadedLayers

        num_layers, rates = model.num_layers, (self.offload_prefetch_step, *self._rates())
        if self.offload_policy is None:
            asked = self.cpu_offload_gb * _GIB
            layer_bytes = model.layer_bytes(serving.weights) / serving.num_devices
            check_cpu_offload(asked, num_layers * layer_bytes)
            return OffloadedLayers((1,) * math.ceil(asked / max(1.0, layer_bytes)), *rates)
        placement = Placement.parse(self.offload_policy)
        if placement.kv_device < 1 or placement.activations_device < 1:
            raise ValueError(
                "expected an offload_policy that ends with 100,0,100,0, of weights only, got "
                f"{self.offload_policy!r}"
            )
        return OffloadedLayers(tuple(filter(None, spread(placement[:3], num_layers))), *rates)

    def _rates(self) -> tuple[float, float]:
        """Bytes a second of the link of each device, and of the disk."""
        return parse_rate("--link", self.link), parse_rate("--disk-rate", self.disk_rate)

    def tiers(self, num_devices: int) -> tuple[Tier, ...]:
        """Return the tiers of devices that share a model.

        Raises:
            ValueError: a size is not above 0, a rate is none, or an answer has no token.
        """
        if self.answer_tokens < 1:
            raise ValueError(f"expected --answer-tokens of 1 or more, got {self.answer_tokens}")
        link, disk = self._rates()
        link, found = link * num_devices, []
        for name, size, ways in (
            ("host", self.kv_offloading_size, {"link": link}),
            ("disk", self.kv_offloading_disk_size, {"link": link, "disk": disk}),
        ):
            if size is None:
                continue
            if not 0 < size < math.inf:
                raise ValueError(f"expected sizes of offloading in GiB above 0, got {size}")
            binds = min(ways, key=ways.__getitem__)
            byte_s = sum(1 / rate for rate in ways.values())
            found.append(Tier(name, int(size * _GIB), byte_s, 1 / ways[binds], binds, self.answer_tokens))
        return tuple(found)
