"""A server to simulate: limits, buckets and durations, served under a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from graphs import BatchShape, BucketTable, CostFunction, Miss, StepCost, StepLimits
from graphs.shape import row_len
from hpu_duo.engine.scheduler import ChunkTrimming, Scheduler
from hpu_duo.lab.simulate.forecast import Forecast
from hpu_duo.lab.simulate.offload import SimulatedHost
from hpu_duo.lab.simulate.run_log import OffloadFigures, RunLog
from hpu_duo.lab.simulate.sessions import SessionArrivals
from hpu_duo.lab.simulate.step_times import StepTimes
from hpu_duo.lab.traces import Session
from hpu_duo.planning import Deployment, step_cost, step_limits
from hpu_duo.planning.simulation import SimulatedEngine, Simulation, SyntheticDrafts, VirtualTime
from hpu_duo.scheduling import make_policy


@dataclass(frozen=True)
class SimulatedServer:
    """A server that is simulated.

    Attributes:
        limits: of its steps.
        seconds_of: seconds of a step in a bucket.
        cost: relative cost of shapes, by which padding is counted.
        table: its buckets; None runs steps at their exact shapes.
        trims_chunks: whether prompts end at the borders of buckets.
        source: of the seconds, in words.
        acceptance_length: mean tokens of a row that verifies drafts; only with ``limits.draft_lens``.
        host: memory for what the prefix cache evicts; None = it is lost.
    """

    limits: StepLimits
    seconds_of: Callable[[BatchShape], float]
    cost: CostFunction
    table: BucketTable | None = None
    trims_chunks: bool = False
    source: str = ""
    acceptance_length: float = 1.0
    host: SimulatedHost | None = None

    @classmethod
    def on(
        cls, deployment: Deployment, draft_lens: tuple[int, ...] = (), acceptance_length: float = 1.0
    ) -> SimulatedServer:
        """A model on Gaudi, by the cost model, with the table that is made from its limits.

        Args:
            draft_lens: tokens of a row that steps without prompts may verify; () = no drafts.
            acceptance_length: see ``acceptance_length``.

        Raises:
            ValueError: not one request of the longest length fits.
        """
        limits = replace(
            step_limits(deployment),
            uses_rows=deployment.plan(1, 1).uses_rows,
            decode_len=max(draft_lens, default=1),
            draft_lens=draft_lens,
        )
        cost = step_cost(deployment)
        by_len = {
            each: replace(deployment, serving=replace(deployment.serving, decode_len=each, draft_lens=()))
            for each in draft_lens or (1,)
        }
        seconds_of = lru_cache(maxsize=None)(
            lambda bucket: by_len[row_len(bucket, 1, draft_lens)].bucket_seconds(bucket).value
        )
        source = f"cost model, {deployment.serving.num_devices} x {deployment.serving.hardware.title}"
        table = _table(limits, cost)
        return cls(limits, seconds_of, cost, table, source=source, acceptance_length=acceptance_length)

    @classmethod
    def measured(cls, times: StepTimes) -> SimulatedServer:
        """An engine whose steps were measured."""
        cost = StepCost(block_size=times.limits.block_size)
        source = f"measured, {', '.join(map(str, times.engine.values()))}"
        return cls(times.limits, times, cost, times.table, source=source)

    def with_limits(self, limits: StepLimits) -> SimulatedServer:
        """The same with other limits, and the table that is made from them if there is a table."""
        if limits == self.limits:
            return self
        table = None if self.table is None else _table(limits, self.cost)
        return replace(self, limits=limits, table=table)

    def with_table(self, table: BucketTable) -> SimulatedServer:
        """The same with other buckets.

        Raises:
            ValueError: they do not hold every step that may come.
        """
        if self.limits.draft_lens:
            table = table.with_drafts(self.limits.draft_lens)
        for phase in self.limits.reachable_phases:
            found = table.fit(self.limits.largest_of(phase))
            if isinstance(found, Miss):
                raise ValueError(f"expected buckets for every step within the limits: {found}")
        return replace(self, table=table)

    def caching_prefixes(self, num_snapshots: int | None) -> SimulatedServer:
        """The same with a prefix cache.

        Args:
            num_snapshots: states of streaming heads that it keeps; None is what the limits say if they have
                a cache, else as many as requests run. Models whose heads all keep blocks need none.
        """
        if num_snapshots is None and self.limits.caches_prefixes:
            return self
        wanted = self.limits.max_num_seqs if num_snapshots is None else num_snapshots
        kept = wanted if self.limits.uses_rows else 0
        return replace(self, limits=replace(self.limits, caches_prefixes=True, num_snapshots=kept))

    def without_prefixes(self) -> SimulatedServer:
        """The same without a prefix cache."""
        limits = replace(self.limits, caches_prefixes=False, num_snapshots=0, max_block_moves=0)
        return replace(self, limits=limits)

    def run(
        self,
        policy: str,
        sessions: Sequence[Session],
        *,
        seed: int = 0,
        forecast: Forecast | None = None,
        until_s: float = float("inf"),
    ) -> RunLog:
        """Serve sessions under a policy.

        Args:
            policy: name, with options; see ``hpu_duo.scheduling.make_policy``.
            seed, forecast: see ``SessionArrivals``.
            until_s: no step begins later.

        Raises:
            ValueError: no such policy, or a request that does not fit.
            GraphMissError: no bucket holds a step.
        """
        arrivals = SessionArrivals(sessions, self.limits.max_model_len, seed, forecast)
        log = RunLog(arrivals.came, self.cost)
        engine = self.engine(policy)
        for step in Simulation(engine, arrivals).steps(until_s):
            log.take(step)
        if (tiers := engine.scheduler.allocations.tiers) is not None:
            log.offload = OffloadFigures.of(tiers, engine.stalled)
        log.close()
        return log

    def engine(self, policy: str) -> SimulatedEngine:
        """Make an engine that serves under a policy, with nothing cached.

        Raises:
            ValueError: no such policy.
        """
        trimming = None
        if self.trims_chunks and self.table is not None:
            trimming = ChunkTrimming(self.table, self.limits.block_size).num_postponed
        limits = self.limits if self.host is None else self.host.staged(self.limits)
        scheduler, time = Scheduler(limits, trimming, make_policy(policy)), VirtualTime()
        link = None if self.host is None else self.host.attach(scheduler, time)
        drafts = None
        if lens := self.limits.draft_lens:
            drafts = SyntheticDrafts(lens, self.acceptance_length)
        return SimulatedEngine(scheduler, self.seconds_of, self.table, drafts, link, time)

    @property
    def max_request_len(self) -> int:
        """Tokens of the longest request that it can serve."""
        if not self.limits.uses_blocks:
            return self.limits.max_model_len
        # The last token that a request samples is never cached.
        return min(self.limits.max_model_len, self.limits.num_blocks * self.limits.block_size + 1)


def _table(limits: StepLimits, cost: CostFunction) -> BucketTable:
    """The table that is made from limits."""
    table = BucketTable.exponential(limits.without_drafts, cost=cost)
    return table.with_drafts(limits.draft_lens) if limits.draft_lens else table
