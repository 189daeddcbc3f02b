"""A server of a model with an end-of-text token, and calls of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import GenerationConfig

from tests.engine.tiny import make_tiny
from tests.server.conftest import TinyChat
from tests.server.live import Live, live

EOS = 2
ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": 3}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@contextmanager
def served(tmp_path_factory: pytest.TempPathFactory, **settings: Any) -> Iterator[Live]:
    """The server, for as long as the context lasts."""
    tiny = make_tiny(tmp_path_factory.mktemp("ending"), {EOS: "<eos>"})
    GenerationConfig(pad_token_id=0, eos_token_id=EOS).save_pretrained(tiny.path)
    with live(TinyChat(tiny).load(max_model_len=200), **settings) as running:
        yield running
