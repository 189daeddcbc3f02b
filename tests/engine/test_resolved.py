"""The resolved settings of an engine: logged once, and part of its statistics."""

from __future__ import annotations

import json
import logging

import pytest

from graphs.backends.compile import CompileBackend
from tests.engine.tiny import BLOCK, MAX_LEN, PATTERN, Tiny


def test_what_was_left_open_is_told_as_what_it_came_to(tiny: Tiny) -> None:
    loaded = tiny.load(attention="auto", device="auto", dtype="auto", pattern=PATTERN, max_model_len=None)
    found = loaded.stats().resolved
    assert (found.device, found.dtype, found.attention) == ("cpu", "float32", "sdpa")
    assert (found.graphs, found.num_buckets, found.on_miss) == ("eager", 0, "eager")
    assert (found.num_retrieval_heads, found.num_streaming_heads) == (2, 2)
    assert found.limits is loaded.engine.scheduler.limits
    assert found.limits.max_model_len == loaded.engine.limits.max_model_len > 0
    assert "auto" not in json.dumps(found.items())


def test_a_table_is_told_by_its_size_and_trimming_by_name(tiny: Tiny) -> None:
    loaded = tiny.load(graphs=CompileBackend(compiler="eager"), trim_chunks=True, max_captured_tokens=8)
    found = loaded.stats().resolved
    assert found.graphs == "compile"
    assert found.num_buckets == len(loaded.engine.runner.graphs.table) > 0
    assert (found.on_miss, found.trims_chunks, found.max_captured_tokens) == ("error", True, 8)


def test_it_is_logged_once_at_the_start(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hpu_duo"):
        loaded = tiny.load()
        loaded.engine.generate([[1, 2, 3]])
    lines = [record.getMessage() for record in caplog.records if "max_num_seqs=" in record.getMessage()]
    assert len(lines) == 1
    for text in (f"block_size={BLOCK}", f"max_model_len={MAX_LEN}", "device=cpu", "attention=reference"):
        assert text in lines[0]
