"""A tiny model with a chat template, and a server of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from hpu_duo import HPUDuoModel
from tests.engine.tiny import Tiny
from tests.server.live import Live, live

CHAT_TEMPLATE = (
    "{% if tools %}[<tool_call>{{ tools | length }}]{% endif %}"
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{{ ending }}{% endif %}"
)


@dataclass(frozen=True)
class TinyChat:
    """The checkpoint; ``load`` gives it a chat template."""

    tiny: Tiny

    def load(self, **options: object) -> HPUDuoModel:
        """Serve it, with a chat template."""
        model = self.tiny.load(**options)
        assert model.tokenizer is not None
        model.tokenizer.chat_template = CHAT_TEMPLATE
        return model


@pytest.fixture(scope="session")
def tiny(tiny: Tiny) -> TinyChat:
    return TinyChat(tiny)


@pytest.fixture(scope="module")
def server(tiny: TinyChat) -> Iterator[Live]:
    with live(tiny.load()) as running:
        yield running
