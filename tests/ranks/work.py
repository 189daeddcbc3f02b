"""Work of the processes of tests: several models, one after the other, in the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpu_duo.config.engine import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    HeadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from hpu_duo.device import Member
from hpu_duo.device.ranks import Membership, RankError, Ranks, Sent, joined
from hpu_duo.engine.engine import Engine
from hpu_duo.engine.orders import Execute, FinishWarmUp, Order, Stop, Touch, follow
from hpu_duo.engine.step_input import StepInput
from hpu_duo.engine.stepper import Runner
from hpu_duo.sampling import SamplingParams
from hpu_duo.startup.assembly import assemble, engine_around
from hpu_duo.startup.device_side import Place
from hpu_duo.startup.ranks import LedRanks, OwnLaunch, heartbeat_to_rank_0, joined_as
from hpu_duo.startup.sharding import build_share
from kernels_ref import Budget
from tests.modeling.families import BLOCK

NUM_NEW = 10
Kept: TypeAlias = list[dict[tuple[str, int], np.ndarray]]


@dataclass(frozen=True)
class Hang:
    """An order that no rank but 0 carries out in time."""

    def carry_out(self, runner: object) -> None:
        """Sleep."""
        time.sleep(600)


@dataclass(frozen=True)
class HangInWarmUp(Touch):
    """An order of a warm-up, which has no limit, in which every rank but 0 sleeps."""

    def carry_out(self, runner: object) -> None:
        """Sleep."""
        time.sleep(600)


@dataclass(frozen=True)
class Nap(Execute):
    """A step in which every rank but 0 sleeps, while its heartbeat thread goes on."""

    def carry_out(self, runner: object) -> None:
        """Sleep."""
        time.sleep(600)


@dataclass(frozen=True)
class Case:
    """A model, and how it is served.

    Attributes:
        path: of the checkpoint.
        prompts, params: requests, submitted together.
        heads, cache, scheduler, graph, model, parallel: settings besides the usual ones.
        warms_up: whether all buckets are captured first.
    """

    path: Path
    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    heads: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    graph: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    warms_up: bool = False

    def config(self, size: int) -> EngineConfig:
        """Settings of an engine of so many ranks."""
        return EngineConfig(
            model=ModelConfig(path=self.path, **{"device": "cpu", "dtype": "float32", **self.model}),
            heads=HeadConfig(**self.heads),
            cache=CacheConfig(**{"block_size": BLOCK, "num_blocks": 64, **self.cache}),
            scheduler=SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 32, **self.scheduler}),
            graph=GraphConfig(**self.graph),
            parallel=ParallelConfig(
                tensor_parallel_size=size, timeout_s=120.0, **{"retrieval_parallel": "heads", **self.parallel}
            ),
        )


@dataclass(frozen=True)
class Answer:
    """Tokens of an engine of several ranks.

    Attributes:
        tokens: of each request.
        error: in place of them.
        seen: further facts, of rank 0.
        of_ranks: what each rank has counted by itself, rank 0 first; see ``Own``.
    """

    tokens: list[list[int]] = field(default_factory=list)
    error: str = ""
    seen: dict[str, Any] = field(default_factory=dict)
    of_ranks: tuple[Own, ...] = ()


@dataclass(frozen=True)
class Own:
    """Counts of one rank.

    Attributes:
        misses, late, captures: steps that no bucket held, captures outside the warm-up, and all captures.
        recompiles: graphs of a device or of Dynamo that were compiled more than once, since the warm-up.
        findings: compilations, captures and operators on the host's CPU since the warm-up, in words.
        kv_bytes, planned_bytes: of the tensors of its store, and of its plan.
        broadcasts: sent or received.
        kept: see ``kept_of``.
    """

    misses: int
    late: int
    captures: int
    recompiles: int
    findings: tuple[str, ...]
    kv_bytes: int
    planned_bytes: int
    broadcasts: int
    kept: Kept

    @classmethod
    def of(cls, runner: Runner, membership: Membership, findings: tuple[str, ...]) -> Own:
        """Read the other counters."""
        counters = runner.graphs.counters
        return cls(
            counters.misses,
            counters.late_captures,
            counters.captures,
            runner.watch.snapshot().num_recompiles,
            findings,
            runner.store.num_bytes,
            runner.store.plan.total_bytes,
            membership.link.sent.num_broadcasts,
            kept_of(runner),
        )


def kept_of(runner: Runner) -> Kept:
    """Positions in the slots of heads with a budget, of the rows of requests, in order.

    By layer, and there by policy and slots; of all requests so far, a row that several had after another.
    """
    found: Kept = []
    for spec, cache in zip(runner.model.specs, runner.store.layers):
        of_layer: dict[tuple[str, int], np.ndarray] = {}
        for group, units in zip(spec.groups, cache):
            if isinstance(group.kind, Budget) and units.state is not None:
                lines = units.state.position[: runner.store.plan.max_num_seqs].cpu().numpy()
                # All versions of the slots of a head.
                shape = len(lines), group.kind.versions, group.num_heads, -1
                by_head = lines.reshape(shape).swapaxes(1, 2).reshape(len(lines), group.num_heads, -1)
                of_layer[group.kind.policy.name, group.kind.budget] = np.sort(by_head, axis=-1)
        found.append(of_layer)
    return found


class Sums(TorchDispatchMode):
    """Counts sums over ranks and other exchanges, those of uncaptured steps.

    Attributes:
        count, num_bytes: of sums.
        gathered, scattered: bytes that this rank gave to gathers, and to exchanges all to all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = self.num_bytes = self.gathered = self.scattered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_reduce.default:
            self.count += 1
            self.num_bytes += args[0].nbytes
        elif func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.gathered += args[0].nbytes
        elif func is torch.ops._c10d_functional.all_to_all_single.default:
            self.scattered += args[0].nbytes
        return func(*args, **(kwargs or {}))


class Told:
    """Worker ranks that are members of the same test."""

    def __init__(self, membership: Membership) -> None:
        self._link = membership.link
        self.messages: list[StepInput] = []

    def tell(self, order: Any) -> None:
        """Send it."""
        if isinstance(order, Execute):
            self.messages.append(order.message)
        self._link.send(order)

    @property
    def sent(self) -> Sent:
        """Counts of what has been sent in this test so far."""
        return self._link.sent

    @property
    def message_bytes(self) -> int:
        """Bytes of a broadcast: of the longest message that a step may need."""
        return self._link.num_bytes

    def failed(self, error: BaseException) -> RankError:
        """End the test."""
        raise error

    def when_lost(self, callback: Callable[[RankError], None]) -> None:
        """Do nothing: the test ends with an error of its own."""

    def kill(self) -> None:
        """Do nothing: no test stops in a step."""


class Heard:
    """Orders that a follower gets, and what its device has done since the end of the warm-up."""

    def __init__(self, membership: Membership, runner: Runner) -> None:
        self._link, self._watch = membership.link, runner.watch
        self._was_warm_up, self._warm = False, runner.watch.snapshot()

    def receive(self) -> Order:
        """Wait for the next order, once the one before has been carried out."""
        if self._was_warm_up:
            self._warm = self._watch.snapshot()
        order = self._link.receive()
        self._was_warm_up = isinstance(order, FinishWarmUp)
        return order

    @property
    def findings(self) -> tuple[str, ...]:
        """Compilations, captures and operators on the host's CPU since then."""
        return (self._watch.snapshot() - self._warm).findings


def follow_orders(member: Member, timeout_s: float) -> None:
    """Follow rank 0 without a model."""
    ranks, store = Ranks(member.rank, member.size), member.store()
    with (
        heartbeat_to_rank_0(ranks.rank, store, timeout_s) as heartbeat,
        joined_as(ranks, "gloo", store, torch.device("cpu"), timeout_s) as membership,
    ):
        while not isinstance(order := membership.link.receive(), Stop):
            order.carry_out(None)
            heartbeat.count()


def lead(size: int, timeout_s: float) -> LedRanks:
    """Lead ranks without a model; returns once they wait for orders."""
    ranks = LedRanks(OwnLaunch("cpu", size, follow_orders, (timeout_s,)), size, timeout_s)
    ranks.join("gloo", torch.device("cpu"))
    ranks.is_led = True
    return ranks


def serve_here(case: Case) -> Answer:
    """Return the answer of one process."""
    return _answer(assemble(case.config(1), frozenset()), case)


def serve(
    member: Member,
    cases: dict[str, Case],
    within: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> dict[str, Answer]:
    """Serve all cases by all ranks, each inside a context for its name; returns what rank 0 got."""
    torch.set_num_threads(1)
    kind = next(iter(cases.values())).model.get("device", "cpu")
    config = next(iter(cases.values())).config(member.size)
    place = Place.of(config, member.rank)
    store = member.store()
    own = Ranks(member.rank, member.size)
    with joined(own, place.runtime.collectives(), store, place.device, 120.0) as membership:
        assert all(case.model.get("device", "cpu") == kind for case in cases.values())
        answers = {}
        for name, case in cases.items():
            with within(name):
                answers[name] = _serve(case, member, membership)
        return answers


def _serve(case: Case, member: Member, membership: Membership) -> Answer:
    config = case.config(member.size)
    place = Place.of(config, member.rank)
    followers = Told(membership) if member.rank == 0 else None
    error, side = "", None
    try:
        side = build_share(config, place, membership, followers)
    except ValueError as refusal:
        error = str(refusal)
    if side is None:
        return Answer(error=error)
    if member.rank:
        heard = Heard(membership, side.runner)
        follow(heard, side.runner)
        membership.collect(Own.of(side.runner, membership, heard.findings))
        return Answer()
    answer = _answer(engine_around(side, config, frozenset()), case)
    membership.link.send(Stop())
    own = Own.of(side.runner, membership, answer.seen["findings"])
    return replace(answer, of_ranks=tuple(membership.collect(own)))


def _answer(engine: Engine, case: Case) -> Answer:
    if case.warms_up:
        runner = engine.runner
        for bucket in runner.graphs.table:
            runner.warmup.capture(bucket)
        runner.warmup.finish(runner.graphs.table)
    before, warm = engine.stats().ranks, engine.runner.watch.snapshot()
    with Sums() as sums:
        samples = engine.generate(case.prompts, list(case.params))
    stats = engine.stats()
    seen: dict[str, Any] = {
        "preemptions": stats.num_preemptions,
        "kv_bytes": engine.runner.store.num_bytes,
        "retrieval": engine.stats().resolved.num_retrieval_heads,
        "dtypes": (stats.resolved.weight_dtype, stats.resolved.kv_cache_dtype, stats.resolved.dtype),
        "promoted": (stats.resolved.num_promoted_heads, stats.resolved.promoted_bytes),
        "captures": engine.runner.graphs.counters.captures,
        "misses": stats.num_graph_misses,
        "late": stats.num_late_captures,
        "findings": (engine.runner.watch.snapshot() - warm).findings,
        "broadcasts": 0
        if before is None or stats.ranks is None
        else stats.ranks.num_broadcasts - before.num_broadcasts,
        "steps": stats.num_steps,
        "query_tokens": stats.num_query_tokens,
        "ranks": (before, stats.ranks),
        "message_bytes": getattr(engine.runner.executor.followers, "message_bytes", 0),
        "sums": sums.count,
        "summed_bytes": sums.num_bytes,
        "gathered_bytes": sums.gathered,
        "scattered_bytes": sums.scattered,
        "buckets": [
            (each.bucket, each.sampling is not None)
            for each in getattr(engine.runner.executor.followers, "messages", ())
        ],
        "cached": stats.prefixes.num_hit_tokens if stats.prefixes else 0,
        "kept": kept_of(engine.runner),
        "budgets": stats.budgets,
        "row_bytes": engine.runner.store.plan.row_bytes,
        "loaded": 0 if stats.offload is None else stats.offload.num_loaded,
        "swap": None if stats.offload is None or stats.offload.swap is None else vars(stats.offload.swap),
        "disk": None
        if stats.offload is None or stats.offload.disk is None
        else vars(stats.offload.disk.counters),
    }
    return Answer([list(sample.token_ids) for each in samples for sample in each], seen=seen)
