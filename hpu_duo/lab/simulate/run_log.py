"""Notes of a simulated run: every request's times, every user's service, and the padding of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from graphs import BatchShape, CostFunction
from hpu_duo.kv.tiers.disk import DiskCounters
from hpu_duo.kv.tiers.prefix_tiers import PrefixTiers
from hpu_duo.kv.tiers.swap import SwapCounters
from hpu_duo.planning.simulation import SimulatedStep
from hpu_duo.request import Request

NOBODY = "(no user)"
"""Name of the user of requests that name none."""

PROMPT_PRICE, OUTPUT_PRICE = 1, 2
"""Service of a computed prompt token, and of an output token: the prices of VTC (arXiv:2401.00588)."""


@dataclass
class RequestRecord:
    """One request; times are those of the clock, None for what has not happened.

    Attributes:
        user: who sent it.
        arrived: time at which it came.
        num_prompt_tokens, num_output_tokens: tokens it had, and got.
        num_cached_tokens: tokens of its prompt that were taken up from the prefix cache at first.
        started: start of the first step with a share for it.
        first_token, ended: ends of the steps with its first and its last token.
        num_preemptions: how often it lost its row.
        num_losses: how often it lost its replica.
    """

    user: str
    arrived: float
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    num_preemptions: int = 0
    num_losses: int = 0
    num_computed: int = 0

    @property
    def ttft(self) -> float | None:
        """Time from coming to the first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot(self) -> float | None:
        """Mean time of the tokens behind the first one; None for fewer than two, or before the end."""
        if self.ended is None or self.first_token is None or self.num_output_tokens < 2:
            return None
        return (self.ended - self.first_token) / (self.num_output_tokens - 1)

    @property
    def e2el(self) -> float | None:
        """Time from coming to the end."""
        return None if self.ended is None else self.ended - self.arrived

    @property
    def latency_per_token(self) -> float | None:
        """Time from coming to the end, divided by the output's tokens."""
        return None if self.e2el is None else self.e2el / self.num_output_tokens


@dataclass
class ServiceLog:
    """Service of users over time: parallel lists, one entry for a user in a step.

    Attributes:
        times: ends of the steps, ascending.
        users: names.
        amounts: ``PROMPT_PRICE`` for each prompt token computed for the first time, and ``OUTPUT_PRICE`` for
            each output token. What the prefix cache had costs nothing, and neither does computing again.
    """

    times: list[float] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    amounts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class OffloadFigures:
    """Traffic between devices, host memory and disk in a run.

    Attributes:
        num_hit_tokens: tokens that were loaded from host or disk, and not computed.
        num_disk_hit_tokens: of blocks that were read from the disk for requests.
        stored_bytes, loaded_bytes: to the host, and from there.
        num_lost: blocks and snapshots that were evicted while transfers, or host memory, were busy.
        num_declined: prefixes that were predicted to be computed faster than loaded.
        stalled_s: time in which all requests waited for loads.
        disk_written_bytes, disk_read_bytes: to the disk, and from there.
        num_swapped: preempted requests that were copied to the host, and back.
        num_recomputed: those that were computed again.
    """

    num_hit_tokens: int
    num_disk_hit_tokens: int
    stored_bytes: int
    loaded_bytes: int
    num_lost: int
    num_declined: int
    stalled_s: float
    disk_written_bytes: int
    disk_read_bytes: int
    num_swapped: int
    num_recomputed: int

    @classmethod
    def of(cls, tiers: PrefixTiers, stalled_s: float) -> OffloadFigures:
        """Collect the counters of a run."""
        counters = tiers.counters
        disk = DiskCounters() if tiers.disk is None else tiers.disk.counters
        swap = SwapCounters() if tiers.swap is None else tiers.swap.counters
        return cls(
            num_hit_tokens=counters.num_hit_tokens,
            num_disk_hit_tokens=disk.num_hit_tokens,
            stored_bytes=counters.stored_bytes,
            loaded_bytes=counters.loaded_bytes,
            num_lost=counters.num_busy,
            num_declined=counters.num_computed,
            stalled_s=stalled_s,
            disk_written_bytes=disk.written_bytes,
            disk_read_bytes=disk.read_bytes,
            num_swapped=swap.num_in,
            num_recomputed=swap.num_recomputed,
        )


class RunLog:
    """Takes the steps of a run.

    Args:
        came: time and user of each request by its id; requests may be added until their first step.
        cost: relative cost of shapes, by which padding is counted.

    Attributes:
        records: by request id; those that came and had no step yet are added by ``close``.
        service: of all users.
        num_steps, busy: steps, and the time they took together.
        num_tokens, num_padded_tokens: query tokens of steps, and of their buckets.
        cost_of_shapes, cost_of_buckets: what steps would cost without padding, and what they cost.
        end: end of the last step.
        offload: of the run, once it has ended; None without host memory.
    """

    def __init__(self, came: Mapping[str, tuple[float, str | None]], cost: CostFunction) -> None:
        self._came = came
        self._cost = lru_cache(maxsize=4096)(cost)
        self.records: dict[str, RequestRecord] = {}
        self._running: dict[Request, RequestRecord] = {}
        self._decoded: BatchShape | None = None
        self.service = ServiceLog()
        self.offload: OffloadFigures | None = None
        self.num_steps = self.num_tokens = self.num_padded_tokens = 0
        self.busy = self.end = self.cost_of_shapes = self.cost_of_buckets = 0.0

    def take(self, step: SimulatedStep) -> None:
        """Note a step."""
        self.num_steps += 1
        self.busy += step.duration
        self.end = step.end
        self.num_tokens += step.shape.query_len
        self.num_padded_tokens += step.bucket.query_len
        self.cost_of_shapes += float(self._cost(step.shape))
        self.cost_of_buckets += float(self._cost(step.bucket))
        served: dict[str, int] = {}
        for request in step.plan.preempted:
            if request in self._running:
                self._running[request].num_preemptions += 1
        if step.shape is not self._decoded:  # as long as it is, the same requests decode
            self._take_prompts(step, served)
        self._take_tokens(step, served)
        self.service.times += [step.end] * len(served)
        self.service.users += served
        self.service.amounts += served.values()

    def lose(self, request: Request) -> None:
        """Note that a request has lost its replica, and begins anew: what it had got counts for nothing."""
        record = self._record_of(request.request_id)
        record.started = record.first_token = None
        record.num_output_tokens = record.num_computed = 0
        record.num_losses += 1
        self._running.pop(request, None)

    def close(self) -> None:
        """Note the requests that came and were never served."""
        for request_id in self._came:
            self._record_of(request_id)

    def _take_prompts(self, step: SimulatedStep, served: dict[str, int]) -> None:
        self._decoded = step.shape
        for row in step.plan.rows:
            request = row.request
            record = self._running.get(request)
            if record is None:
                record = self._running[request] = self._begun(request, step.start)
            if record.num_computed >= request.num_prompt_tokens:
                continue
            self._decoded = None
            end = min(row.start + row.num_new_tokens, request.num_prompt_tokens)
            # A request that was preempted computes again what it has been served before.
            new = end - max(row.start, record.num_computed)
            if new > 0:
                served[record.user] = served.get(record.user, 0) + PROMPT_PRICE * new
                record.num_computed = end

    def _take_tokens(self, step: SimulatedStep, served: dict[str, int]) -> None:
        end = step.end
        for done in step.committed:
            record = self._running[done.request]
            served[record.user] = served.get(record.user, 0) + OUTPUT_PRICE
            record.num_output_tokens += 1
            if record.first_token is None:
                record.first_token = end
            if done.finish_reason is not None:
                record.ended = end
                del self._running[done.request]

    def _begun(self, request: Request, start: float) -> RequestRecord:
        record = self._record_of(request.request_id)
        record.started = start
        record.num_prompt_tokens = request.num_prompt_tokens
        record.num_cached_tokens = min(request.num_cached_tokens or 0, request.num_prompt_tokens)
        return record

    def _record_of(self, request_id: str) -> RequestRecord:
        found = self.records.get(request_id)
        if found is None:
            arrived, user = self._came[request_id]
            found = self.records[request_id] = RequestRecord(NOBODY if user is None else user, arrived)
        return found
