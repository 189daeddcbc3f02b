"""Random limits, and random steps within them."""

from typing import Any

from hypothesis import strategies as st

from graphs import BatchShape, Phase, StepLimits


def _limits(max_num_seqs: int, decode_len: int, num_spare_tokens: int, **others: Any) -> StepLimits:
    num_tokens = max_num_seqs * decode_len + num_spare_tokens
    return StepLimits(
        max_num_seqs=max_num_seqs, decode_len=decode_len, max_num_batched_tokens=num_tokens, **others
    )


def limits_of(decode_len: st.SearchStrategy[int]) -> st.SearchStrategy[StepLimits]:
    """Limits whose rows decode so many tokens at most."""
    return st.builds(
        _limits,
        max_num_seqs=st.integers(1, 40),
        decode_len=decode_len,
        num_spare_tokens=st.integers(0, 600),
        max_model_len=st.integers(1, 5000),
        block_size=st.sampled_from([1, 16, 128]),
        num_blocks=st.integers(1, 700),
        uses_blocks=st.booleans(),
        max_chunk_rows=st.integers(1, 8),
    )


limits_strategy = limits_of(st.sampled_from([1, 1, 2, 8]))


@st.composite
def scheduled_shapes(draw: st.DrawFn, limits: StepLimits, *, has_prompts: bool = True) -> BatchShape:
    """Draw rows first and derive the shape from them, so that ``StepLimits`` is checked, not repeated."""
    max_rows = limits.max_num_seqs
    shortest = limits.decode_len + 1
    max_chunks = min(limits.max_chunk_rows, limits.max_num_seqs, limits.max_num_batched_tokens // shortest)
    num_chunks = draw(st.integers(0, max_chunks if has_prompts else 0))
    num_left = limits.max_num_batched_tokens - shortest * num_chunks
    num_decodes = draw(st.integers(0 if num_chunks else 1, min(limits.max_num_seqs - num_chunks, num_left)))
    num_decoded = draw(st.integers(num_decodes, min(num_decodes * limits.decode_len, num_left)))
    chunk_tokens = 0
    if num_chunks:
        chunk_tokens = draw(st.integers(shortest * num_chunks, limits.max_num_batched_tokens - num_decoded))
    has_context = num_chunks > 0 and draw(st.booleans())
    num_shared = num_unique = 0
    if limits.uses_blocks:
        per_request = -(-limits.max_model_len // limits.block_size)
        of_chunks = num_chunks * per_request if has_context else 0
        of_decodes = num_decodes * per_request // 2 if num_decodes > 1 else 0
        num_shared = draw(st.integers(0, min(of_chunks + of_decodes, limits.num_blocks)))
        num_unique = draw(st.integers(1, limits.num_blocks)) if num_decodes else 0
    phase = Phase(num_chunks > 0, has_context or num_shared > 0, num_decodes > 0)
    num_rows = num_chunks + num_decodes
    num_logits = draw(st.integers(num_rows, max(num_rows, min(max_rows, chunk_tokens + num_decoded))))
    return BatchShape(phase, chunk_tokens + num_decoded, num_shared, num_unique, num_logits)
