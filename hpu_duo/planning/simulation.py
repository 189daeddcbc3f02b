"""The real scheduler on a virtual clock, and bucket tables planned with it."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from graphs import BatchShape, BucketTable, CostFunction, GraphMissError, Miss, StepCost, StepLimits
from graphs.planner import (
    ASSUMED,
    FINE,
    GraphBudget,
    Resolution,
    Traffic,
    mean_padding,
    or_default,
    plan_table,
)
from graphs.planner.evaluation import halton
from graphs.table import PlannedPadding
from hpu_duo.drafting.draft_gain import DraftLengths
from hpu_duo.engine.batch import exact_shape
from hpu_duo.engine.scheduler import ChunkTrimming, Scheduler
from hpu_duo.engine.step_plan import CommittedToken, StepPlan
from hpu_duo.kv.tiers.link import Link
from hpu_duo.request import Request, TokenLimits
from hpu_duo.sampling import SamplingParams


class Arrivals(Protocol):
    """A source of requests on a virtual clock, in its units of time."""

    def due(self, now: float) -> Sequence[Request]:
        """Return the requests that have arrived by ``now``, each once; siblings follow their parent."""
        ...

    def next_time(self) -> float | None:
        """Return the next arrival, as far as known before another request ends; None = never."""
        ...

    def ended(self, request: Request, now: float) -> None:
        """Called when a request has all of its tokens at ``now``."""
        ...


class StepShapes:
    """Shapes of the steps of a scheduler, in their order.

    The shape of decodes within their blocks is that of the step before, so it is recomputed only when a
    request arrives, ends, or needs another block.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._shape: BatchShape | None = None
        # The rows of the next step if it goes on with this one, and for how many steps no block ends.
        self._next: tuple[list[Request], list[int], list[int]] | None = None
        self._num_alike = 0

    def of(self, plan: StepPlan) -> BatchShape:
        """Return the shape of the next step; every step has to be shown.

        It is the same object as that of the step before only if the same rows decode in both.
        """
        size, rows = self._block_size, plan.rows
        expected, self._next = self._next, None
        if plan.moves or sum([row.num_new_tokens for row in rows]) != len(rows):
            self._shape = exact_shape(plan, size)
            return self._shape
        starts = [row.start for row in rows]
        here = [row.request for row in rows], [row.ring_row for row in rows], starts
        # What a decode reads follows from its row and from where it is in its blocks, while these stay.
        self._num_alike -= 1
        if self._shape is None or here != expected or self._num_alike < 0:
            self._shape = exact_shape(plan, size)
            # None follow a last token of a block, else as many as are left before the next last one.
            self._num_alike = size - 1 - max([(start + 1) % size or size - 1 for start in starts])
        self._next = (*here[:2], [start + 1 for start in starts])
        return self._shape


@dataclass(frozen=True)
class SimulatedStep:
    """One step that was served.

    Attributes:
        start, duration: in the units of the clock.
        plan: rows and copies of the step.
        shape: the exact shape, the very object of the engine's step before if the same rows decode in both.
        bucket: the shape it was padded to; without a table the exact shape.
        committed: the tokens that it added to requests, each with the reason if it ended its request.
    """

    start: float
    duration: float
    plan: StepPlan
    shape: BatchShape
    bucket: BatchShape
    committed: tuple[CommittedToken, ...]

    @property
    def end(self) -> float:
        """Time at which its tokens are there."""
        return self.start + self.duration


@dataclass
class VirtualTime:
    """A moment on a clock without a clock: moved by whoever computes durations."""

    now: float = 0.0

    def move(self, to: float) -> None:
        """Move on to a later moment."""
        self.now = max(self.now, to)


class SimulatedEngine:
    """Serves its requests step by step, without a clock of its own.

    Every sampled token is the one that its request forces, or 0, so the length of a request follows from its
    parameters (``max_tokens`` with ``ignore_eos``).

    Args:
        scheduler: plans the steps, as for an engine; trims prompts if it has ``ChunkTrimming``. It must not
            be used otherwise.
        duration_of: duration of a step in a bucket, above 0, in the units of the clock.
        table: buckets that steps are padded to; None runs each at its exact shape.
        drafts: of its decodes; None = there are none.
        link: to the host, on the clock of ``time``; None = nothing is offloaded.
        time: set to the start of each step; an attribute too.

    Attributes:
        stalled: time in which all requests waited for the link.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        duration_of: Callable[[BatchShape], float],
        table: BucketTable | None = None,
        drafts: SyntheticDrafts | None = None,
        link: Link | None = None,
        time: VirtualTime | None = None,
    ) -> None:
        self.scheduler, self._drafts, self._link = scheduler, drafts, link
        self.time, self.stalled = VirtualTime() if time is None else time, 0.0
        if drafts is not None:
            scheduler.drafting = drafts
        self._duration_of, self._table = duration_of, table
        self._shapes = StepShapes(scheduler.limits.block_size)
        self._shape: BatchShape | None = None
        self._bucket: BatchShape | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether it has a request to serve."""
        return self.scheduler.has_unfinished

    def add(self, request: Request) -> None:
        """Queue a request for the next step; ValueError if the pool is too small for it."""
        self.scheduler.add(request)

    def step(self, start: float) -> SimulatedStep:
        """Serve one step that starts at a time; there must be an unfinished request.

        Raises:
            ValueError: the time of the bucket is not positive.
            GraphMissError: no bucket holds the step.
        """
        self.time.now = start
        plan = self._plan()
        self.stalled += self.time.now - start
        start = self.time.now
        shape = self._shapes.of(plan)
        if self._bucket is None or shape is not self._shape:
            self._shape, self._bucket = shape, self._bucket_of(shape)
        bucket = self._bucket
        duration = self._duration_of(bucket)
        if not duration > 0:
            raise ValueError(f"expected a duration above 0 for {bucket}, got {duration}")
        accepted = None if self._drafts is None else self._drafts.num_accepted(plan)
        committed = tuple(self.scheduler.commit(plan, _tokens_of(plan), accepted))
        if self._drafts is not None:
            self._drafts.ran(plan, len(committed), duration)
        if self._link is not None:
            self._offload(self._link, plan, duration if shape.phase.causal else 0.0)
        return SimulatedStep(start, duration, plan, shape, bucket, committed)

    def _plan(self) -> StepPlan:
        """Plan a step with rows; while there is none, time moves on to the next transfer that lands."""
        while True:
            plan = self.scheduler.plan()
            assert plan is not None, "somebody is unfinished"
            if plan.rows or self._link is None:
                return plan
            self._offload(self._link, plan, 0.0)
            tiers = self.scheduler.allocations.tiers
            assert tiers is not None, "expected a tier behind the link"
            tiers.wait_any()
            self.scheduler.commit(plan, ())

    def _offload(self, link: Link, plan: StepPlan, prompt_time: float) -> None:
        """Begin the transfers of a plan, and note the time of a step with prompts."""
        if plan.transfers is not None:
            link.wait(plan.transfers.landed)
            link.begin(plan.transfers)
        tiers = self.scheduler.allocations.tiers
        if prompt_time and tiers is not None:
            tiers.load_policy.computed(plan.num_tokens, prompt_time)

    def _bucket_of(self, shape: BatchShape) -> BatchShape:
        if self._table is None:
            return shape
        found = self._table.fit(shape)
        if isinstance(found, Miss):
            raise GraphMissError(found)
        return found


def _tokens_of(plan: StepPlan) -> list[int]:
    """Tokens that the step samples: the forced ones of each request, then zeros."""
    rows = plan.sampled_rows
    if not any(row.request.params.forced_token_ids for row in rows):
        return [0] * plan.num_samples
    return [
        int(row.request.tokens[place]) if row.request.params.forced_token_ids else 0
        for row in rows
        for place in range(row.end - row.num_samples + 1, row.end + 1)
    ]


class Simulation:
    """An engine on a virtual clock.

    Steps follow each other without a gap while there is a request. Requests that arrive during a step are
    planned with the next one. Deterministic for equal arrivals and engines.

    Args:
        engine: serves the requests.
        arrivals: the requests.

    Attributes:
        now: time on the clock, from 0 on.
    """

    def __init__(self, engine: SimulatedEngine, arrivals: Arrivals) -> None:
        self.engine, self.now = engine, 0.0
        self._arrivals = arrivals

    def steps(self, until: float = float("inf")) -> Iterator[SimulatedStep]:
        """Serve steps that begin before ``until``, as long as there are requests or will be.

        Raises:
            ValueError: the pool is too small for a request, or the time of a bucket is not positive.
            GraphMissError: no bucket holds a step.
        """
        while self._wait(until):
            step = self.engine.step(self.now)
            self.now = step.end
            for done in step.committed:
                if done.finish_reason is not None:
                    self._arrivals.ended(done.request, self.now)
            yield step

    def _wait(self, until: float) -> bool:
        """Add the requests that have arrived, or wait for the next one; returns whether a step is to run."""
        self._add_due()
        while not self.engine.has_unfinished:
            coming = self._arrivals.next_time()
            if coming is None or coming >= until:
                return False
            self.now = max(self.now, coming)
            self._add_due()
        return self.now < until

    def _add_due(self) -> None:
        for request in self._arrivals.due(self.now):
            self.engine.add(request)


_NUM_WORKLOADS = 40
_STEPS_PER_WORKLOAD = 200
_LOADS = (0.03, 2.0)
_PAUSES = (1.0, 50.0)
_SHORTEST_PROMPT, _LONGEST_PROMPT_SHARE = 128, 1 / 4
_OUTPUTS, _LONGEST_OUTPUT_SHARE = (16, 4096), 1 / 8
_SIGMA = 0.8
_SHARE_THAT_SAMPLES, _SAMPLED_SHARE = 1 / 3, 0.5
_MOST_SAMPLES = 8


@dataclass(frozen=True)
class Population:
    """Users of one kind, of which ``prior`` has many.

    Attributes:
        num_users: each has at most one request at a time.
        pause: mean number of steps between a request and the next, exponential.
        prompt, output: medians of log-normal numbers of tokens.
        sampled_share: share of the prompts that are answered two to eight times, from one cached prompt.
    """

    num_users: int
    pause: float
    prompt: float
    output: float
    sampled_share: float

    @classmethod
    def drawn(cls, limits: StepLimits, number: int) -> Population:
        """Return the kind of a number, from 0 on; the sizes of all together are spread evenly (Halton)."""
        load, prompt, output, samples, pause = (halton(number + 1, base) for base in (2, 3, 5, 7, 11))
        most = limits.max_model_len
        longest_prompt = max(1.0, most * _LONGEST_PROMPT_SHARE)
        longest_output = max(1.0, min(_OUTPUTS[1], most * _LONGEST_OUTPUT_SHARE))
        return cls(
            max(1, round(_between(*_LOADS, load) * limits.max_num_seqs)),
            _between(*_PAUSES, pause),
            _between(min(_SHORTEST_PROMPT, longest_prompt), longest_prompt, prompt),
            _between(min(_OUTPUTS[0], longest_output), longest_output, output),
            _SAMPLED_SHARE if samples < _SHARE_THAT_SAMPLES else 0.0,
        )


def _between(low: float, high: float, share: float) -> float:
    """A number between two, at a share of the way on a logarithmic scale."""
    return low * (high / low) ** share


def prior(
    limits: StepLimits,
    seed: int = 0,
    table: BucketTable | None = None,
    cost: CostFunction | None = None,
) -> dict[BatchShape, float]:
    """The steps of stated workloads, as the scheduler plans them; no tensors, no model.

    There are 40 kinds of users, each served for 200 steps from an idle start. The duration of every step is
    one. Users send a request, wait for its end (of samples, the first one's), pause, and send the next. What
    a kind is like is drawn evenly on a logarithmic scale, each figure independent of the others:

    - as many users as 0.03 to 2 times ``max_num_seqs``, with pauses of 1 to 50 steps on average;
    - prompts of 128 tokens to a quarter of ``max_model_len`` in the median, log-normal of sigma 0.8;
    - outputs of 16 to 4,096 tokens, or an eighth of ``max_model_len`` if that is less, likewise;
    - in a third of the kinds, half of the prompts are answered two to eight times, from one cached prompt.

    Prompts have no common prefixes, so nothing is reused from a prefix cache. Prompts and outputs that exceed
    ``max_model_len`` or the blocks are cut.

    Args:
        seed: of the kinds and of their users.
        table: prompts end at the borders of its buckets, see ``ChunkTrimming``; None trims none.
        cost: all kinds count alike by it, so that those with long steps do not outweigh the others; None
            counts steps.

    Returns:
        The frequency of each shape; the same for the same arguments.
    """
    served = _prior(limits, seed) if table is None else _served(limits, seed, table)
    found: dict[BatchShape, float] = {}
    for steps in served:
        whole = 1.0 if cost is None else sum(cost(shape) * count for shape, count in steps.items())
        for shape, count in steps.items():
            found[shape] = found.get(shape, 0.0) + count / whole
    return found


@lru_cache(maxsize=16)
def _prior(limits: StepLimits, seed: int) -> tuple[Counter[BatchShape], ...]:
    return _served(limits, seed, None)


def _served(limits: StepLimits, seed: int, table: BucketTable | None) -> tuple[Counter[BatchShape], ...]:
    """Count the steps of each kind of users."""
    trimming = None if table is None else ChunkTrimming(table, limits.block_size).num_postponed
    found = []
    for number in range(seed * _NUM_WORKLOADS, (seed + 1) * _NUM_WORKLOADS):
        users = Users(limits, random.Random(number), Population.drawn(limits, number))
        simulation = Simulation(SimulatedEngine(Scheduler(limits, trimming), _one_unit), users)
        found.append(Counter(step.shape for step in simulation.steps(until=_STEPS_PER_WORKLOAD)))
    return tuple(found)


def _one_unit(bucket: BatchShape) -> float:
    return 1.0


class Users:
    """The users of ``prior``: each has at most one request at a time.

    Args:
        rng: draws lengths and pauses.
        population: the kind of users.
    """

    def __init__(self, limits: StepLimits, rng: random.Random, population: Population) -> None:
        held = limits.num_blocks * limits.block_size if limits.uses_blocks else limits.max_model_len
        self._limits = TokenLimits(max(2, min(limits.max_model_len, held)))
        self._rng, self._population = rng, population
        self._num_sent = 0
        # The first requests of all users are spread over the time of one pause.
        spread = max(1, round(population.pause))
        self._due: list[float] = sorted(rng.randrange(spread) for _ in range(population.num_users))
        self._due[0] = 0

    def due(self, now: float) -> list[Request]:
        """Return the requests of users after their pause."""
        found: list[Request] = []
        while self._due and self._due[0] <= now:
            heapq.heappop(self._due)
            found += self._samples()
        return found

    def next_time(self) -> float | None:
        """Return when the next pause ends."""
        return self._due[0] if self._due else None

    def ended(self, request: Request, now: float) -> None:
        """Let the user of the request pause."""
        if request.parent is None:
            heapq.heappush(self._due, now + round(self._rng.expovariate(1 / self._population.pause)))

    def _samples(self) -> list[Request]:
        """The next prompt with its lengths drawn, once for each sample."""
        most, kind = self._limits.max_model_len, self._population
        prompt, output = (
            max(1, round(median * math.exp(self._rng.gauss(0, _SIGMA))))
            for median in (kind.prompt, kind.output)
        )
        num_samples = 1
        if self._rng.random() < kind.sampled_share:
            num_samples = self._rng.randint(2, _MOST_SAMPLES)
        num_prompt = min(prompt, most - 1)
        params = SamplingParams(max_tokens=min(output, most - num_prompt), ignore_eos=True)
        name = f"r{self._num_sent}"
        self._num_sent += 1
        first = Request(name, np.full(num_prompt, self._num_sent, np.int32), params, self._limits)
        others = (
            first.sibling(f"{name}.{i}", sample_index=i, sampling_seed=i) for i in range(1, num_samples)
        )
        return [first, *others]


def plan_buckets(
    limits: StepLimits,
    budget: GraphBudget | int,
    cost: CostFunction | None = None,
    traffic: Traffic | None = None,
    *,
    resolution: Resolution = FINE,
) -> BucketTable:
    """Choose the buckets that pad least, within a budget, and hold every reachable shape.

    Args:
        budget: an int is a number of graphs.
        cost: default ``StepCost(block_size=limits.block_size)``.
        traffic: recorded shapes and how often each occurs. None plans for ``prior``, blurred by
            ``ASSUMED``, and returns the default table (``BucketTable.exponential``) if that costs less on
            other users of the same kind.
        resolution: finer is slower and pads less.

    Returns:
        The table, with the padding of the recording, or of those other users, as planned padding.

    Raises:
        ValueError: see ``graphs.planner.plan_table``.
    """
    budget = GraphBudget.of(budget)
    if traffic is not None:
        return _promising(plan_table(limits, budget, traffic, cost, resolution=resolution), traffic)
    budget.check_holds(limits.largest)  # validated before the simulation
    cost = cost or StepCost(block_size=limits.block_size)
    planned = plan_table(limits, budget, prior(limits, cost=cost), cost, blur=ASSUMED, resolution=resolution)
    others = prior(limits, seed=1, cost=cost)
    return _promising(or_default(planned, budget, limits, others), others)


def _promising(table: BucketTable, traffic: Traffic) -> BucketTable:
    """Return the table with its planned padding."""
    return replace(table, planned_padding=PlannedPadding.by(table.cost, mean_padding(table, traffic)))


class SyntheticDrafts:
    """Proposes as many drafts as there is room for, of which as many are accepted as is stated.

    Args:
        lens: tokens of a row, see ``StepLimits.draft_lens``.
        acceptance_length: mean tokens of a verified row, 1 or more, if its draft is long enough.
        seed: of the draws.
    """

    def __init__(self, lens: Sequence[int], acceptance_length: float, seed: int = 0) -> None:
        self._lengths, self._rng = DraftLengths(lens), random.Random(seed)
        self._accepted = acceptance_length - 1

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return drafts, whose tokens say nothing."""
        return () if self._lengths.pauses(request) else [0] * most

    def choose(self, found: Mapping[Request, Sized], num_rows: int, longest: int) -> int:
        """Return the tokens of a row, as an engine chooses them."""
        return self._lengths.choose({request: len(drafts) for request, drafts in found.items()}, num_rows)

    def skip(self, reason: str) -> None:
        """Do nothing."""

    def num_accepted(self, plan: StepPlan) -> list[int]:
        """Draw the accepted tokens of each of ``plan.sampled_rows``."""
        found = []
        for row in plan.sampled_rows:
            num_drafts, whole = row.num_samples - 1, int(self._accepted)
            num_right = min(num_drafts, whole + (self._rng.random() < self._accepted - whole))
            if num_drafts:
                self._lengths.verified(row.request, num_drafts, num_right)
            found.append(1 + num_right)
        return found

    def ran(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        """Note a step and its tokens."""
        if plan.num_samples and plan.rows[-1].num_new_tokens <= plan.decode_len:
            self._lengths.ran(len(plan.rows), plan.decode_len, num_tokens, seconds)
        for row in plan.rows:
            if row.request.is_finished:
                self._lengths.end(row.request)
