"""A log whose file takes nothing does not keep the server from ending."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

from hpu_duo.server.telemetry.request_log import RequestLog


def test_a_pipe_that_nobody_reads_is_given_up(tmp_path: Path) -> None:
    pipe = tmp_path / "calls"
    os.mkfifo(pipe)
    log = RequestLog(pipe, patience_s=0.2)
    closing = Thread(target=log.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    # Let the writer's thread go.
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
