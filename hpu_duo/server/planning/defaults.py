"""Values of sampling parameters that a request leaves out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """Those of the OpenAI API, unless a checkpoint says otherwise.

    Whether the checkpoint samples at all (``do_sample``) is not asked: the API's temperature is 1 either way.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, checkpoint: str | Path) -> SamplingDefaults:
        """Read generation_config.json; it need not say anything.

        transformers fills in defaults of its own, so the file itself is read.
        """
        file = Path(checkpoint) / "generation_config.json"
        if not file.is_file():
            return cls()
        said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{name: said[name] for name in _NAMES if said.get(name) is not None})
