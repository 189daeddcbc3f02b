"""One replica: a model, and the server's application around it, without a port of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from hpu_duo.ray_serve.arguments import EngineSettings
from hpu_duo.ray_serve.exchange import EngineCall, Head, exchange
from hpu_duo.server.running.admission import Stage

_log = logging.getLogger(__name__)

_LOOK_S = 0.05


class Engine:
    """A deployment of Ray Serve: one replica is one engine.

    A replica takes calls once every shape is captured. It is unhealthy when its engine has ended, and Ray
    starts another one in its place.

    Args:
        settings: of model and server.
    """

    # Ray awaits it.
    async def __init__(self, settings: EngineSettings) -> None:  # type: ignore[misc]
        # Everything that needs torch is imported where a model is served.
        from hpu_duo.llm import HPUDuoModel
        from hpu_duo.server.http.app import create_app
        from hpu_duo.server.service import Service

        loaded = HPUDuoModel.from_pretrained(settings.path, **settings.engine)
        for note in loaded.engine.notes:
            _log.info("%s", note)
        self._service = Service(loaded, settings.server)
        self._app = create_app(self._service)
        await self._service.start(settings.warm_up and loaded.engine.runner.executor.uses_table)
        while self._service.stage is Stage.WARMING_UP:
            await asyncio.sleep(_LOOK_S)
        await self.check_health()

    async def answer(self, ticket: None, call: EngineCall) -> AsyncIterator[Head | bytes]:
        """Answer a call: yields the head, then the body.

        Args:
            ticket: what the ingress and its router know the call by; nothing of it comes here.
        """
        async for piece in exchange(self._app, call):
            yield piece

    async def check_health(self) -> None:
        """Tell Ray whether this replica can serve.

        Raises:
            RuntimeError: it cannot, and never will again.
        """
        if self._service.stage is Stage.FAILED:
            raise RuntimeError("the engine has ended; the log of the replica says why")

    async def __del__(self) -> None:
        if service := self.__dict__.get("_service"):
            await service.stop()
