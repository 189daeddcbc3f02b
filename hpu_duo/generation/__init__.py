"""transformers' ``generate`` and its arguments, on an engine."""

from hpu_duo.generation.arguments import as_eos_ids
from hpu_duo.generation.call import GenerativeModel

__all__ = ["GenerativeModel", "as_eos_ids"]
