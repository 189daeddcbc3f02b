"""The device and the model that are tested, in a form that is passed to the processes of all stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR

if TYPE_CHECKING:
    from hpu_duo.llm import HPUDuoModel

SIMULATED = "hpu-sim"
_SINK, _RECENT = 4, 28
"""A window that is shorter than prompts of the self-test."""
_LENGTHS = (150, 9, 40, 1)
_MAX_TOKENS = 12
_FIRST_TOKEN = 3


@dataclass(frozen=True)
class Subject:
    """The device and the model that are tested.

    Attributes:
        device: a name as the engine takes it, not "auto".
        model: checkpoint whose steps are timed; the other stages use the built-in model.
        hardware: name of the accelerator for predictions, None where it is unknown.
        num_cards: processes that exchange data; None = one for each card.
        seed: of prompts.
    """

    device: str
    model: Path = MODEL_DIR
    hardware: str | None = None
    num_cards: int | None = None
    seed: int = 0

    @property
    def kind(self) -> str:
        """The device without its number."""
        return self.device.partition(":")[0]

    def load(self, device: str | None = None, **options: Any) -> HPUDuoModel:
        """Load the built-in model, half of its heads streaming, with limits that make every phase occur soon.

        Args:
            device: default the tested one; "cpu" for the model to compare with.
            options: see ``HPUDuoModel.from_pretrained``.
        """
        from hpu_duo.llm import HPUDuoModel

        small: dict[str, Any] = {
            "max_num_seqs": 3,
            "max_num_batched_tokens": 64,
            "max_model_len": 256,
            "block_size": 16,
            "num_blocks": 48,
        }
        heads = {"pattern": PATTERN_DIR, "sparsity": 0.5, "sink": _SINK, "recent": _RECENT}
        given = {"device": device or self.device, **small, **heads, **options}
        return HPUDuoModel.from_pretrained(MODEL_DIR, **given)

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids of prompts: one that is cut into chunks, short ones, and a single token."""
        import random

        rng = random.Random(self.seed)
        return [[rng.randrange(_FIRST_TOKEN, vocab_size) for _ in range(num)] for num in _LENGTHS]


def run_prompts(model: HPUDuoModel, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Greedy tokens of prompts that are served together."""
    from hpu_duo.sampling import SamplingParams

    params = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True)
    found: dict[str, list[int]] = {model.engine.add_request(prompt, params): [] for prompt in prompts}
    while model.engine.has_unfinished:
        for output in model.engine.step():
            if output.error is not None:
                raise output.error
            found[output.request_id] += output.token_ids
    return [tuple(tokens) for tokens in found.values()]
