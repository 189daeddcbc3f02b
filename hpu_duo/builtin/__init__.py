"""A tiny Llama with real retrieval heads that ships with the package, and its head pattern.

``MODEL_DIR`` is an ordinary transformers checkpoint directory, ``PATTERN_DIR`` its head pattern in the
format published with DuoAttention (``full_attention_heads.tsv`` + ``config.json``). Both make tests, examples
and first steps possible without a download. ``docs/builtin-model.md`` says how they were made and what they
can do.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
PATTERN_DIR: Path = Path(__file__).parent / "pattern"

__all__ = ["MODEL_DIR", "PATTERN_DIR"]
