"""What one call of ``generate`` asks for, from transformers' arguments and inputs."""

from hpu_duo.generation.arguments import GenerationRequest, as_token_ids, read_generation
from hpu_duo.generation.inputs import TokenLists, read_inputs

__all__ = ["GenerationRequest", "TokenLists", "as_token_ids", "read_generation", "read_inputs"]
