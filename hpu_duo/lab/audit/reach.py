"""Check that steps can be as large as the buckets that are to be traced."""

from __future__ import annotations

from graphs import BatchShape, BucketTable, StepLimits


def check_reach(table: BucketTable, limits: StepLimits) -> None:
    """Refuse buckets that no step fills: their memory would say nothing about steps that occur.

    More query tokens than a step has are padding, as in any table, and are accepted.

    Raises:
        ValueError: a bucket has a phase that no step has, or gathers more blocks than any step does.
    """
    for bucket in table:
        _check_bucket(bucket, limits)


def _check_bucket(bucket: BatchShape, limits: StepLimits) -> None:
    if bucket.phase not in limits.reachable_phases:
        phases = ", ".join(map(str, limits.reachable_phases))
        raise ValueError(
            f"expected buckets of phases that occur with max_num_seqs={limits.max_num_seqs} and "
            f"max_num_batched_tokens={limits.max_num_batched_tokens}, {phases}, got {bucket}"
        )
    most = limits.max_shared_blocks(bucket.phase)
    if bucket.num_shared_blocks > most:
        raise ValueError(
            f"expected at most {most} shared blocks in a bucket of phase {bucket.phase}, all that a step "
            f"gathers with max_model_len={limits.max_model_len}, block_size={limits.block_size}, "
            f"max_num_seqs={limits.max_num_seqs}, max_chunk_rows={limits.max_chunk_rows} and "
            f"{limits.num_blocks} blocks, got {bucket}"
        )
