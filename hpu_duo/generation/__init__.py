"""One call of ``generate``: transformers' arguments and inputs in, and its tensor out."""

from hpu_duo.generation.arguments import GenerationRequest, as_token_ids, read_generation
from hpu_duo.generation.inputs import TokenLists, read_inputs
from hpu_duo.generation.results import assemble_rows, feed

__all__ = [
    "GenerationRequest",
    "TokenLists",
    "as_token_ids",
    "assemble_rows",
    "feed",
    "read_generation",
    "read_inputs",
]
