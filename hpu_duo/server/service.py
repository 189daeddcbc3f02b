"""The service of one model behind an API: admission, calls, and shutdown."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from hpu_duo.server.config import ServerConfig
from hpu_duo.server.planning import ChatPlanner, CompletionPlanner, Plan, SamplingDefaults, Scoring, Served
from hpu_duo.server.prompts import PromptEncoder, TokenTexts
from hpu_duo.server.responding import CallerGoneError, PlannedResponse, as_api_error, while_there
from hpu_duo.server.running import AsyncEngine, Holding, OutputStream
from hpu_duo.server.running.admission import Admission, NotServingError, Stage, Timing
from hpu_duo.server.telemetry.metrics import ServerMetrics
from hpu_duo.server.telemetry.request_log import CallRecord
from hpu_duo.server.tools import resolve_parser

if TYPE_CHECKING:
    from hpu_duo.engine.engine import Engine
    from hpu_duo.llm import HPUDuoModel

_log = logging.getLogger(__name__)

_DRAIN_LOOK_S = 0.05
_GONE = 499
"""nginx's status for calls whose callers disconnected; in logs and metrics only."""

Sink = Callable[[CallRecord], None]
"""Called with the record of each call at its end."""


class Service:
    """Serves calls with one model.

    ``start`` and ``stop`` and everything else is called in one event loop.

    Args:
        model: loaded; its engine is stepped by the service only.
        config: settings.
        sinks: called with each record at the end of a call, such as a log.

    Attributes:
        engine: its asynchronous interface.
        served: description of the model for requests.
        metrics: of calls and steps.
        admission: admission control.
        warm_up_progress: captured and total graphs; None without a warm-up.
        memory: sizes of the KV cache.
        is_left_behind: whether the service has stopped, but the engine's thread has not.
    """

    def __init__(self, model: HPUDuoModel, config: ServerConfig, sinks: tuple[Sink, ...] = ()) -> None:
        self.config, self._model = config, model
        self.engine = AsyncEngine(
            model.engine, config.max_behind, config.max_answer_bytes, config.answer_memory_bytes
        )
        self.served = _served(model, self.engine, config)
        self.completions, self.chats = CompletionPlanner(self.served), ChatPlanner(self.served)
        rows = model.engine.scheduler.limits.max_num_seqs
        self.admission = Admission(rows + config.max_queue)
        self.warm_up_progress: tuple[int, int] | None = None
        self.memory = model.engine.runner.store.plan
        self._watch = model.engine.runner.watch
        self._before = self._watch.snapshot()
        self.metrics = ServerMetrics(
            self.served.names[0],
            lambda: self.engine.stats,
            lambda: self.engine.num_open,
            lambda: self.num_recompiles,
            lambda: self.engine.memory.num_bytes,
            config.metrics_namespace,
        )
        self._sinks: tuple[Sink, ...] = (self.metrics.ended, *sinks)
        self.is_left_behind = False

    # Lifecycle

    async def start(self, warm_up: bool = False) -> None:
        """Start to serve; returns once the engine's thread runs, before the warm-up has ended.

        Args:
            warm_up: capture all buckets first, before ``stage`` is ready.
        """
        self.engine.start()
        self._warming = asyncio.create_task(self._warm_up(warm_up))

    async def stop(self) -> None:
        """Abort running requests, and stop the engine's thread."""
        self.admission.stage = Stage.DRAINING
        self._warming.cancel()
        if not await self.engine.stop():
            self.is_left_behind = True
            _log.warning("the engine's thread is in a step that does not end; stopping without it")
        if self.served.encoder is not None:
            self.served.encoder.close()

    async def drain(self) -> bool:
        """Reject new requests, and wait for running ones.

        Returns:
            Whether all have ended within ``drain_seconds``; others end with an error.
        """
        self.admission.stage = Stage.DRAINING
        deadline = time.monotonic() + self.config.drain_seconds
        while self._is_busy and self.engine.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_LOOK_S)
        is_empty = not self._is_busy
        if not is_empty:
            self.engine.fail_all(NotServingError(Stage.DRAINING))
        return is_empty

    @property
    def _is_busy(self) -> bool:
        return bool(self.engine.num_open or self.admission.num_held)

    @property
    def stage(self) -> Stage:
        """The stage of its lifecycle."""
        return self.admission.stage if self.engine.is_alive else Stage.FAILED

    async def _warm_up(self, is_wanted: bool) -> None:
        try:
            if is_wanted:
                await self.engine.ask(self._capture)
        except _Draining:
            return
        except Exception as error:
            _log.critical("the warm-up has failed", exc_info=error)
            self.admission.stage = Stage.FAILED
            return
        if self.admission.stage is Stage.WARMING_UP:
            self.admission.stage = Stage.READY

    def _capture(self, _: Engine) -> None:
        """Capture every bucket, in the engine's thread."""

        def progress(done: int, total: int, _: object) -> None:
            self.warm_up_progress = (done, total)
            if self.admission.stage is Stage.DRAINING:
                raise _Draining

        self._model.warmup(progress)

    @property
    def num_recompiles(self) -> int:
        """Compilations and captures after warm-up, since the start of this service."""
        return (self._watch.snapshot() - self._before).num_recompiles

    # Calls

    async def answer(self, request: Request, planned: Callable[[], Awaitable[Plan]]) -> Response:
        """Serve a call.

        Args:
            planned: validates the request and returns its plan.

        Raises:
            ApiError: it is invalid; other errors: it cannot be served now.
        """
        record = CallRecord(request.url.path, Timing(self.metrics), dict(request.headers))
        try:
            plan, stream = await while_there(request.receive, self._opened(record, planned))
        except CallerGoneError:
            record.is_cut = True
            self._over(record)
            return Response(status_code=_GONE)
        except Exception as error:
            record.error = as_api_error(error)
            self._over(record)
            raise record.error from error
        return PlannedResponse(plan, stream, record, self._over, self.config.quiet_s)

    async def _opened(
        self, record: CallRecord, planned: Callable[[], Awaitable[Plan]]
    ) -> tuple[Plan, OutputStream | None]:
        """Plan a call and submit it; its stream is None if nothing is generated."""
        self._admit(1)
        if not self.engine.is_alive:
            raise NotServingError(Stage.FAILED)
        with self.admission.held(1):
            plan = record.plan = await planned()
            submissions = await self.engine.scored(plan.submissions)
        holding = record.holding = self.engine.hold()
        if plan.scoring is None:
            self._admit(plan.num_samples)
        else:
            await self._score(plan.scoring, plan.num_samples, holding)
        holding.echo(plan.answer.num_echoed, len(plan.answer.choices) // len(plan.prompts))
        holding.keeps = not plan.is_streamed
        record.is_opened = True
        return plan, self.engine.open(submissions, record.timing, holding) if plan.num_samples else None

    async def _score(self, scoring: Scoring, num_samples: int, holding: Holding) -> None:
        """Score prompts, and reserve the samples that follow."""
        holding.keeps = True
        submissions = await asyncio.to_thread(lambda: scoring.submissions)
        self._admit(max(len(submissions), num_samples))
        with self.admission.held(num_samples):
            stream = self.engine.open(submissions, holding=holding)
            try:
                await scoring.read(stream)
            finally:
                stream.close()
                self.admission.ended(len(submissions))

    def _admit(self, num_samples: int) -> None:
        self.admission.admit(self.engine.num_open, num_samples)
        self.engine.memory.check()

    def _over(self, record: CallRecord) -> None:
        record.end()
        if record.holding is not None:
            record.holding.release()
        if record.plan is not None and record.is_opened:
            self.admission.ended(record.plan.num_samples)
        for sink in self._sinks:
            sink(record)


class _Draining(Exception):
    """Raised to stop a warm-up between two graphs."""


def _served(model: HPUDuoModel, engine: AsyncEngine, config: ServerConfig) -> Served:
    tokenizer = model.tokenizer
    max_model_len = model.engine.limits.max_model_len
    encoder = None if tokenizer is None else PromptEncoder(tokenizer, max_model_len, config.chat_template)
    path = model.engine_config.model.path
    return Served(
        names=config.model_names,
        engine=engine,
        encoder=encoder,
        texts=None if encoder is None else TokenTexts(encoder.tokenizer),
        defaults=SamplingDefaults.read(path) if config.uses_generation_config else SamplingDefaults(),
        max_model_len=max_model_len,
        max_choices=config.max_choices,
        max_logprobs=config.max_logprobs,
        tool_parser=resolve_parser(
            config.tool_call_parser, None if encoder is None else encoder.template.source
        ),
    )
