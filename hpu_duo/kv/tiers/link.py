"""Transfers between the stores of a device and records in host memory, and a simulated link."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from hpu_duo.kv.tiers.host import RecordKey


class Transfer(NamedTuple):
    """A copy between a unit of the stores and a record.

    Attributes:
        is_row: whether the unit is a row; otherwise a block.
        unit: its id, one of those that are reserved for transfers.
        slots: of the record.
    """

    is_row: bool
    unit: int
    slots: tuple[int, ...]


class DiskRecord(NamedTuple):
    """A record of the disk tier, which each rank reads into its host slots or writes from them.

    Attributes:
        key: of the record.
        parent: digest of the prefix that is one block shorter.
        num_own_tokens: tokens of the last block.
        slots: of the record.
    """

    key: RecordKey
    parent: bytes
    num_own_tokens: int
    slots: tuple[int, ...]


class DiskOrders(NamedTuple):
    """Reads and writes of the disk tier that all ranks run beside steps.

    Attributes:
        number: of these orders, from 1 on.
        reads: records to read, before the others are written.
        writes: records to write.
    """

    number: int
    reads: tuple[DiskRecord, ...] = ()
    writes: tuple[DiskRecord, ...] = ()


@dataclass(frozen=True)
class Transfers:
    """Transfers of a step; plain data, see ``hpu_duo.device.plain``.

    Attributes:
        stores: from units to records. They begin after the copies of the step, which fill the units.
        loads: from records to units. They begin at the same time.
        landed: transfers of earlier steps that have ended on rank 0. Other ranks wait for theirs before the
            copies of the step, which read or fill their units.
        disk: reads and writes of several ranks on disk, which start behind these; None for none.
    """

    stores: tuple[Transfer, ...] = ()
    loads: tuple[Transfer, ...] = ()
    landed: tuple[Transfer, ...] = ()
    disk: DiskOrders | None = None


class Landed(NamedTuple):
    """A transfer that has ended.

    Attributes:
        transfer: as begun.
        is_load: its direction.
        seconds: from the begin of its batch on the link to its end, shared evenly by the batch.
        is_damaged: whether a record that was loaded does not have its checksum.
    """

    transfer: Transfer
    is_load: bool
    seconds: float
    is_damaged: bool = False


class DamagedRecord(ValueError):
    """A record whose bytes are not those that were written."""


class Link(Protocol):
    """Moves units to records and back, while steps run."""

    def begin(self, transfers: Transfers) -> None:
        """Begin the transfers of a step, whose copies are on the device."""
        ...

    def poll(self) -> list[Landed]:
        """Return the transfers that have ended since the last call; waits for none."""
        ...

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Wait until transfers have ended; called before the copies of each step, often of none.

        Raises:
            DamagedRecord: a record does not have its checksum.
        """
        ...

    def wait_any(self, others: Sequence[Future[Any]] = ()) -> None:
        """Wait until a transfer has ended that ``poll`` has not returned, or another thread's work."""
        ...

    def drain(self) -> None:
        """Wait for all transfers, and forget them."""
        ...

    def warm_up(self) -> None:
        """Run what a device compiles."""
        ...


class MovesBytes(Link, Protocol):
    """A link with bytes, which another one times."""

    def poison(self, transfer: Transfer) -> None:
        """Fill a unit with ones in every bit: not a number in every float format."""
        ...


T = TypeVar("T")


class Timed(Future[T]):
    """Work with a known result, which ends at a time of a given clock.

    Args:
        clock: returns seconds.
        lands_at: its end; an attribute too.
    """

    def __init__(self, result: T, lands_at: float, clock: Callable[[], float]) -> None:
        super().__init__()
        self.set_result(result)
        self.lands_at, self._clock = lands_at, clock

    def done(self) -> bool:
        """Whether it has ended by now."""
        return self._clock() >= self.lands_at


@dataclass
class _Flight:
    """A transfer on a simulated link, with the time at which it lands."""

    transfer: Transfer
    is_load: bool
    lands_at: float
    seconds: float


class SimulatedLink:
    """A link with a given speed on a given clock; bytes, if any, arrive when a transfer lands.

    Units of transfers on their way are poisoned, so that whoever reads them too early computes NaN.

    Args:
        record_bytes: bytes of a block, and of a row.
        latency_s: seconds before the first byte of a transfer.
        up, down: bytes a second to the host, and from there.
        clock: returns seconds.
        advance: moves the clock on to a time; for ``wait`` and ``wait_any``.
        link: moves the bytes; None = there are none.
    """

    def __init__(
        self,
        record_bytes: tuple[int, int],
        latency_s: float,
        up: float,
        down: float,
        clock: Callable[[], float],
        advance: Callable[[float], None],
        link: MovesBytes | None = None,
    ) -> None:
        self._record_bytes, self._latency_s, self._rates = record_bytes, latency_s, (up, down)
        self._clock, self._advance, self._link = clock, advance, link
        self._free_at = [0.0, 0.0]
        self._flying: deque[_Flight] = deque()

    def begin(self, transfers: Transfers) -> None:
        """Begin the transfers of a step: each direction moves one after the other."""
        for is_load, each in ((False, transfers.stores), (True, transfers.loads)):
            for transfer in each:
                seconds = self._record_bytes[transfer.is_row] / self._rates[is_load]
                begins = max(self._clock() + self._latency_s, self._free_at[is_load])
                self._free_at[is_load] = begins + seconds
                self._flying.append(_Flight(transfer, is_load, begins + seconds, seconds))
                if is_load and self._link is not None:
                    self._link.poison(transfer)

    def poll(self) -> list[Landed]:
        """Return the transfers that have ended by now."""
        return self._land(lambda flight: flight.lands_at <= self._clock())

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Move the clock on until transfers have ended, and forget them."""
        self._wait_for([each for each in self._flying if each.transfer in transfers])
        self._land(lambda flight: flight.transfer in transfers)

    def wait_any(self, others: Sequence[Future[Any]] = ()) -> None:
        """Move the clock on to the next end; without one wait for another thread's work."""
        timed = [each for each in others if isinstance(each, Timed)]
        flying: list[_Flight | Timed[Any]] = [*self._flying, *timed]
        if flying:
            self._wait_for([min(flying, key=lambda each: each.lands_at)])
        else:
            wait(others, return_when=FIRST_COMPLETED)

    def drain(self) -> None:
        """Move the clock on to the end of all."""
        self._wait_for(self._flying)
        self._land(lambda flight: True)

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def _wait_for(self, flights: Sequence[_Flight | Timed[Any]] | deque[_Flight]) -> None:
        if flights and (last := max(each.lands_at for each in flights)) > self._clock():
            self._advance(last)

    def _land(self, has_ended: Callable[[_Flight], bool]) -> list[Landed]:
        ended, landed = [flight for flight in self._flying if has_ended(flight)], list[Landed]()
        for flight in ended:
            self._flying.remove(flight)
            is_damaged = False
            if self._link is not None:
                one = (flight.transfer,)
                self._link.begin(Transfers(loads=one) if flight.is_load else Transfers(stores=one))
                self._link.wait_any()
                is_damaged = any(each.is_damaged for each in self._link.poll())
                if not flight.is_load:
                    self._link.poison(flight.transfer)
            landed.append(Landed(flight.transfer, flight.is_load, flight.seconds, is_damaged))
        return landed
