"""Options of simulations: the server, and its requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hpu_duo.cli.options import LIMITS, model_option, of_setting, option_in
from hpu_duo.cli.planning.hardware import HARDWARE, HardwareOptions
from hpu_duo.cli.terminal import parse_rate
from hpu_duo.config.limits import CARD_LIMITS, CacheConfig, SchedulerConfig

if TYPE_CHECKING:
    from graphs import StepLimits
    from hpu_duo.kv.plan import MemoryPlan
    from hpu_duo.lab.simulate.fleet import Fleet
    from hpu_duo.lab.simulate.forecast import Forecast
    from hpu_duo.lab.simulate.offload import SimulatedHost
    from hpu_duo.lab.simulate.server import SimulatedServer
    from hpu_duo.lab.traces import Session

_hardware_option = option_in(HARDWARE)


@dataclass(frozen=True)
class MachineOptions:
    """Options of what takes the time of steps: a model on Gaudi, or an engine that was measured."""

    model: Annotated[
        Path | None,
        model_option(
            "Directory with config.json, or the file.", needs_weights=False, show_default="see --step-times"
        ),
    ] = None
    hardware: Annotated[str, _hardware_option("gaudi2 or gaudi3.")] = "gaudi3"
    step_times: Annotated[
        Path | None,
        _hardware_option(
            "Times of steps that hpu-duo bench steps measured, instead of a model on Gaudi.",
            metavar="FILE",
            show_default="the cost model of Gaudi",
        ),
    ] = None


def _replacing(name: str, usual: object) -> Any:
    """Return the option of a limit that is otherwise the hardware's or the measured engine's."""
    return of_setting(name, unset=f"{usual}, or the measured engine's")


@dataclass(frozen=True)
class ServedLimits:
    """Limits of steps that replace those of the hardware or of the engine that was measured."""

    max_model_len: Annotated[
        int | None, of_setting("max_model_len", unset="what the model serves, or the measured engine")
    ] = None
    max_num_seqs: Annotated[int | None, _replacing("max_num_seqs", CARD_LIMITS.max_num_seqs)] = None
    max_num_batched_tokens: Annotated[
        int | None, _replacing("max_num_batched_tokens", CARD_LIMITS.max_num_batched_tokens)
    ] = None
    max_chunk_rows: Annotated[int | None, _replacing("max_chunk_rows", SchedulerConfig.max_chunk_rows)] = None
    block_size: Annotated[
        int | None,
        of_setting("block_size", unset=f"{CacheConfig.block_size}; that of a measured engine is fixed"),
    ] = None
    num_blocks: Annotated[
        int | None, of_setting("num_blocks", unset="what fits on --hardware, or the measured engine's")
    ] = None
    enable_prefix_caching: Annotated[bool | None, _replacing("enable_prefix_caching", "on")] = None
    num_prefix_snapshots: Annotated[
        int | None,
        _replacing("num_prefix_snapshots", "as many as requests run, in an eighth of the memory"),
    ] = None
    kv_offloading_size: Annotated[float | None, of_setting("kv_offloading_size")] = None
    kv_offloading_write_policy: Annotated[str, of_setting("kv_offloading_write_policy")] = "write_back"
    kv_offloading_min_tokens: Annotated[int, of_setting("kv_offloading_min_tokens")] = 1024
    kv_offloading_eviction_policy: Annotated[str, of_setting("kv_offloading_eviction_policy")] = "lru"
    link: Annotated[
        str,
        option_in(LIMITS)("Bytes a second between each device and the host, each way.", metavar="RATE"),
    ] = "32GB/s"
    kv_offloading_disk_size: Annotated[float | None, of_setting("kv_offloading_disk_size")] = None
    disk_rate: Annotated[
        str,
        option_in(LIMITS)("Bytes a second that the disk is read or written with.", metavar="RATE"),
    ] = "3GB/s"
    preemption_mode: Annotated[str, of_setting("preemption_mode")] = "recompute"
    swap_space: Annotated[float | None, of_setting("swap_space")] = None
    buckets: Annotated[
        Path | None,
        of_setting("buckets", panel=LIMITS, unset="made from the limits; a measured engine's own"),
    ] = None
    trim_chunks: Annotated[bool, of_setting("trim_chunks", panel=LIMITS)] = False
    speculative_config: Annotated[str | None, of_setting("speculative_config", panel=LIMITS)] = None
    acceptance_length: Annotated[
        float | None,
        option_in(LIMITS)("Mean tokens of a row that verifies drafts, with --speculative-config; 1 or more."),
    ] = None

    def on(self, machine: MachineOptions, served: HardwareOptions) -> SimulatedServer:
        """Return the server.

        Raises:
            ValueError: the options do not fit together, or a file cannot be read.
        """
        if (machine.model is None) == (machine.step_times is None):
            raise ValueError("expected --model or --step-times, one of them")
        self._check_drafts(machine)
        from graphs.bucket_file import read_table

        if self.kv_offloading_size is not None and machine.model is None:
            raise ValueError("expected --model with --kv-offloading-size: measured steps have no sizes")
        server = self._measured(machine.step_times) if machine.step_times else self._priced(machine, served)
        if self.buckets is not None:
            server = server.with_table(read_table(self.buckets, server.cost))
        if self.trim_chunks and server.table is None:
            raise ValueError("expected --trim-chunks with a table of buckets: the measured engine had none")
        return replace(server, trims_chunks=self.trim_chunks)

    def _check_drafts(self, machine: MachineOptions) -> None:
        if (self.speculative_config is None) != (self.acceptance_length is None):
            raise ValueError("expected --speculative-config and --acceptance-length, both or none of them")
        if self.acceptance_length is not None and not 1 <= self.acceptance_length < float("inf"):
            raise ValueError(f"expected an --acceptance-length of 1 or more, got {self.acceptance_length}")
        if self.speculative_config is not None and machine.model is None:
            raise ValueError("expected --model with --speculative-config: measured steps verify no drafts")
        speculation = SchedulerConfig(speculative_config=self.speculative_config).speculation
        if speculation is not None and speculation.is_by_model:
            raise ValueError(
                "expected a --speculative-config with method suffix or ngram, whose drafts take no time of "
                f"the device, got {speculation.method!r}"
            )

    def _measured(self, path: Path) -> SimulatedServer:
        from hpu_duo.lab.simulate.server import SimulatedServer
        from hpu_duo.lab.simulate.step_times import StepTimes

        server = SimulatedServer.measured(StepTimes.read(path))
        if self.block_size not in (None, server.limits.block_size):
            raise ValueError(
                f"expected --block-size {server.limits.block_size}, that of the engine that was measured, "
                f"got {self.block_size}"
            )
        names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_chunk_rows", "num_blocks")
        server = server.with_limits(self._replaced(server.limits, *names))
        if self._caches_prefixes(unless_told=server.limits.caches_prefixes):
            return server.caching_prefixes(self.num_prefix_snapshots)
        return server.without_prefixes()

    def _priced(self, machine: MachineOptions, served: HardwareOptions) -> SimulatedServer:
        from hpu_duo.lab.simulate.server import SimulatedServer
        from hpu_duo.planning.read_model import read_model

        assert machine.model is not None, "checked before"
        size = read_model(machine.model)
        served = replace(
            served,
            enable_prefix_caching=self._caches_prefixes(unless_told=CacheConfig.enable_prefix_caching),
            num_prefix_snapshots=self.num_prefix_snapshots,
        )
        serving = served.on(
            machine.hardware,
            self._scheduler,
            CacheConfig.block_size if self.block_size is None else self.block_size,
        )
        deployment = served.deployment(size, serving, self.max_model_len or size.max_positions)
        # The other limits are among what decides how much fits.
        lens = SchedulerConfig(speculative_config=self.speculative_config).draft_lens
        server = SimulatedServer.on(deployment, lens, self.acceptance_length or 1.0)
        server = server.with_limits(self._replaced(server.limits, "max_chunk_rows", "num_blocks"))
        CacheConfig(
            kv_offloading_size=self.kv_offloading_size,
            kv_offloading_write_policy=self.kv_offloading_write_policy,
            kv_offloading_min_tokens=self.kv_offloading_min_tokens,
            kv_offloading_eviction_policy=self.kv_offloading_eviction_policy,
            kv_offloading_disk=None if self.kv_offloading_disk_size is None else "simulated",
            kv_offloading_disk_size=self.kv_offloading_disk_size,
            preemption_mode=self.preemption_mode,
            swap_space=self.swap_space,
        )
        if self.kv_offloading_size is None:
            return server
        memory = deployment.plan(1, max(1, server.limits.num_blocks))
        return replace(server, host=self._host(memory, deployment.serving.num_devices, server.limits))

    def _host(self, memory: MemoryPlan, num_devices: int, limits: StepLimits) -> SimulatedHost:
        from hpu_duo.kv.tiers.policy import WritePolicy
        from hpu_duo.kv.tiers.swap import PreemptionMode
        from hpu_duo.lab.simulate.offload import SimulatedHost

        size, disk, swap = (
            int((gib or 0.0) * 2**30)
            for gib in (self.kv_offloading_size, self.kv_offloading_disk_size, self.swap_space)
        )
        link = parse_rate("--link", self.link) * num_devices
        return replace(
            SimulatedHost.of(size, memory, link, limits, swap),
            write=WritePolicy(self.kv_offloading_write_policy),
            eviction=self.kv_offloading_eviction_policy,
            min_tokens=self.kv_offloading_min_tokens,
            disk_bytes=disk,
            disk_rate=parse_rate("--disk-rate", self.disk_rate),
            preemption=PreemptionMode(self.preemption_mode),
        )

    @property
    def _scheduler(self) -> SchedulerConfig:
        """Limits that decide how much fits."""
        names = ("max_num_seqs", "max_num_batched_tokens")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(CARD_LIMITS, **given)

    def _caches_prefixes(self, *, unless_told: bool) -> bool:
        caches = unless_told if self.enable_prefix_caching is None else self.enable_prefix_caching
        if self.num_prefix_snapshots is not None and not caches:
            raise ValueError("expected --num-prefix-snapshots with --enable-prefix-caching")
        return caches

    def _replaced(self, limits: StepLimits, *names: str) -> StepLimits:
        """The limits with those of the names that were given."""
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if "num_blocks" in given and not limits.uses_blocks:
            raise ValueError("expected no --num-blocks: no head of this model keeps blocks")
        return replace(limits, **given)


_replicas_option = option_in("Replicas")
_DEFAULT = "e2"


@dataclass(frozen=True)
class ReplicaOptions:
    """Options of replicas and routers."""

    replicas: Annotated[
        int | None,
        _replicas_option(
            "Engines behind a router, each on devices of its own.", show_default="one engine, no router"
        ),
    ] = None
    router: Annotated[
        list[str] | None,
        _replicas_option(
            "Routers to run side by side: e2, d2lpm, cache-aware, least-loaded or round-robin; "
            "docs/replicas.md has their options.",
            metavar="NAME[:OPTION=VALUE,...]",
            show_default=_DEFAULT,
        ),
    ] = None
    lose_replica: Annotated[
        list[str] | None,
        _replicas_option(
            "Lose a replica at a time, numbered from 0; its requests are sent again.",
            metavar="NUMBER@SECONDS",
            show_default="none is lost",
        ),
    ] = None
    restart_seconds: Annotated[float, _replicas_option("Time until a lost replica serves again.")] = 60.0
    stale_prefixes: Annotated[
        bool, _replicas_option("Do not report the cached tokens of prompts to routers.", "--stale-prefixes")
    ] = False

    @property
    def fleets(self) -> list[Fleet | None]:
        """Replicas behind each router; None is one engine without a router.

        Raises:
            ValueError: a router that there is not, or an option that wants --replicas.
        """
        from hpu_duo.fleet.routing import make_router
        from hpu_duo.lab.simulate.fleet import Fleet
        from hpu_duo.lab.simulate.replicated import Loss

        if self.replicas is None:
            if self.router or self.lose_replica or self.stale_prefixes:
                raise ValueError("expected --router, --lose-replica and --stale-prefixes with --replicas")
            return [None]
        if self.replicas < 1:
            raise ValueError(f"expected --replicas of 1 or more, got {self.replicas}")
        if not self.restart_seconds >= 0:
            raise ValueError(f"expected --restart-seconds of 0 or more, got {self.restart_seconds}")
        losses = tuple(Loss.parse(text, self.restart_seconds) for text in self.lose_replica or ())
        wrong = [each.replica for each in losses if each.replica >= self.replicas]
        if wrong:
            raise ValueError(f"expected --lose-replica below --replicas {self.replicas}, got {wrong[0]}")
        routers = self.router or [_DEFAULT]
        if len(set(routers)) < len(routers):
            raise ValueError(f"expected different routers, got {' '.join(routers)}")
        for name in routers:
            make_router(name)
        return [Fleet(self.replicas, name, losses, not self.stale_prefixes) for name in routers]


_requests_option = option_in("Requests")
_DEFAULT_NUM = 1000


@dataclass(frozen=True)
class Asked:
    """Sessions to serve.

    Attributes:
        sessions: those that a server can hold.
        num_left_out: requests that were longer.
        settings: where they come from, for a result.
    """

    sessions: tuple[Session, ...]
    num_left_out: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class RequestOptions:
    """Options of the requests."""

    workload: Annotated[
        str,
        _requests_option(
            "poisson, bursts, chats, agents, documents or flood, such as chats:turns=8,outputs=300~0.8; "
            "docs/simulate.md has the options.",
            metavar="NAME[:OPTION=VALUE,...]",
        ),
    ] = "poisson"
    trace: Annotated[
        Path | None,
        _requests_option(
            "Requests of a trace: BurstGPT or Azure CSV, Mooncake JSON lines, ShareGPT JSON.",
            metavar="FILE",
            show_default="drawn by --workload",
        ),
    ] = None
    trace_format: Annotated[
        str | None, _requests_option("burstgpt, azure, mooncake or sharegpt.", show_default="found out")
    ] = None
    tokenizer: Annotated[
        Path | None,
        _requests_option(
            "tokenizer.json or its directory, which counts the tokens of ShareGPT.", metavar="PATH"
        ),
    ] = None
    num_requests: Annotated[
        int | None, _requests_option("Requests to serve.", show_default=f"{_DEFAULT_NUM}, or the whole trace")
    ] = None
    request_rate: Annotated[
        float | None,
        _requests_option(
            "Requests of a trace per second, at random times; inf for all at once.",
            show_default="the times of the trace",
        ),
    ] = None
    burstiness: Annotated[
        float,
        _requests_option(
            "With --request-rate, the shape of the gamma distribution of gaps: 1 is Poisson, less comes "
            "in bursts."
        ),
    ] = 1.0
    speed: Annotated[float, _requests_option("How many times as fast a trace is run.")] = 1.0
    length_scale: Annotated[float, _requests_option("Multiplies all lengths of a trace.")] = 1.0
    length_error: Annotated[
        float,
        _requests_option(
            "Spread of the error of expected output lengths, as the standard deviation of the "
            "logarithm; 0 = exact lengths."
        ),
    ] = 0.0
    ranker: Annotated[
        Path | None,
        _requests_option(
            "Ranker of hpu-duo train-ranker, for policies that need one.",
            metavar="DIR",
            show_default="the expected lengths of outputs",
        ),
    ] = None

    @property
    def forecast(self) -> Forecast:
        """Knowledge that policies have of outputs.

        Raises:
            ValueError: a number out of range, or a ranker that cannot be read or used.
        """
        from hpu_duo.lab.simulate.forecast import Forecast

        if self.ranker is None:
            return Forecast(self.length_error)
        from hpu_duo.lab.load.texts import Texts
        from hpu_duo.scheduling.ranker import load_ranker

        if self.tokenizer is None:
            return Forecast(self.length_error, load_ranker(self.ranker))
        if self.length_scale != 1:
            raise ValueError(f"expected --length-scale 1 for a ranker of texts, got {self.length_scale}")
        return Forecast(self.length_error, load_ranker(self.ranker), Texts(self.tokenizer).encode)

    def sessions(self, max_len: int, seed: int) -> Asked:
        """The requests that a server can hold.

        Args:
            max_len: tokens of the longest request that it can.

        Raises:
            ValueError: a trace or a number that cannot be used, or no request at all.
        """
        from hpu_duo.lab.traces import count_requests

        if self.num_requests is not None and self.num_requests < 1:
            raise ValueError(f"expected --num-requests of at least 1, got {self.num_requests}")
        if self.trace is None:
            asked, settings = self._drawn(seed), {"workload": self.workload}
        else:
            asked, settings = self._of_trace(self.trace, seed), self._trace_settings()
        kept = tuple(one for each in asked if (one := each.no_longer_than(max_len)) is not None)
        if not kept:
            shortest = min(each.first.num_tokens for each in asked)
            raise ValueError(
                f"expected a request of at most {max_len} tokens, which the server can hold; the shortest "
                f"has {shortest}: {self._shorter(max_len, shortest, seed)}"
            )
        return Asked(kept, count_requests(asked) - count_requests(kept), settings)

    def _shorter(self, max_len: int, shortest: int, seed: int) -> str:
        """Options that make requests short enough."""
        from hpu_duo.lab.traces import make_workload, with_shorter

        if self.trace is not None:
            return f"give --length-scale {self.length_scale * max_len / (2 * shortest):.2g}"
        # Spreads and the turns of conversations need room too.
        return (
            f"give --workload {with_shorter(self.workload, make_workload(self.workload, seed), max_len // 2)}"
        )

    def _drawn(self, seed: int) -> list[Session]:
        from hpu_duo.lab.traces import make_workload

        for name, value in (("--request-rate", self.request_rate), ("--tokenizer", self.tokenizer)):
            if value is not None:
                raise ValueError(f"expected {name} with --trace; a workload has a rate of its own, per_s")
        return make_workload(self.workload, seed=seed).sessions(self.num_requests or _DEFAULT_NUM)

    def _of_trace(self, path: Path, seed: int) -> list[Session]:
        import numpy as np

        from hpu_duo.lab.load.texts import Texts
        from hpu_duo.lab.traces import Rate, Session, TraceFormat, at_times, read_trace, scaled

        kind = None if self.trace_format is None else TraceFormat.parse(self.trace_format)
        count = None if self.tokenizer is None else Texts(self.tokenizer).count
        trace = read_trace(path, kind, limit=self.num_requests, count_tokens=count)
        found = scaled(trace.arrivals, speed=self.speed, lengths=self.length_scale)
        if self.request_rate is not None or not trace.has_times:
            rate = Rate(float("inf") if self.request_rate is None else self.request_rate, self.burstiness)
            times = rate.times(len(found), np.random.default_rng(seed), fixes_mean=True)
            found = at_times(found, times.tolist())
        return list(map(Session, found))

    def _trace_settings(self) -> dict[str, Any]:
        rate = self.request_rate
        return {
            "trace": None if self.trace is None else self.trace.name,
            "speed": self.speed,
            "length_scale": self.length_scale,
            "request_rate": "inf" if rate == float("inf") else rate,
            "burstiness": self.burstiness,
        }
