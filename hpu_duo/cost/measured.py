"""Speeds measured by the self-test: a file of rows as ``hpu-duo selftest`` writes it.

A JSON object with ``rows``, each with the fields of ``MeasuredRow``. A row names its device, because figures
of a simulated device say nothing about an accelerator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpu_duo.cost.hardware import Format, find_hardware
from hpu_duo.cost.published import PublishedRow, dense_model

SOURCE = "hpu-duo selftest"
_SIZES = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "vocab_size")


@dataclass(frozen=True)
class MeasuredRow:
    """Output tokens per second of a batch of equal requests, in bfloat16, on one device.

    Attributes:
        device: of the engine, such as ``hpu``.
        hardware: name of the accelerator, None where it is unknown.
        model: for reports.
        sizes: of a dense model by the names of ``dense_model``.
        input_len, output_len: tokens of each request.
        batch: requests.
        tokens_per_s: output tokens of all requests by the time of the whole run, prompts included.
    """

    device: str
    hardware: str | None
    model: str
    sizes: Mapping[str, int]
    input_len: int
    output_len: int
    batch: int
    tokens_per_s: float

    @classmethod
    def of(cls, config: Any, *, name: str, **measured: Any) -> MeasuredRow:
        """Make the row of a model with this configuration.

        Args:
            config: of transformers, for text.
        """
        sizes = {
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            "vocab_size": config.vocab_size,
        }
        return cls(model=name, sizes=sizes, **measured)

    def as_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        return asdict(self)

    def published(self) -> PublishedRow:
        """Convert the row to a published one, to which the cost model can be fitted.

        Raises:
            ValueError: the cost model does not know the accelerator.
        """
        if self.device.partition(":")[0] != "hpu":
            raise ValueError(f"a row of {self.model} was measured on {self.device}, which is no Gaudi")
        return PublishedRow(
            source=SOURCE,
            hardware=find_hardware(self.hardware or "unknown"),
            num_devices=1,
            model=dense_model(self.model, **self.sizes),
            format=Format.BF16,
            input_len=self.input_len,
            output_len=self.output_len,
            batch=self.batch,
            tokens_per_s=self.tokens_per_s,
            latency_ms=None,
        )


def read_rows(path: str | Path) -> tuple[MeasuredRow, ...]:
    """Read the rows of a self-test's JSON report.

    Raises:
        ValueError: the file cannot be read, or is no such report.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = tuple(MeasuredRow(**row) for row in document["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected measured rows of hpu-duo selftest in {path}: {error}") from error
    for row in rows:
        if sorted(row.sizes) != sorted(_SIZES):
            raise ValueError(f"expected the sizes {', '.join(_SIZES)} of a model in {path}, got {row.sizes}")
    return rows
