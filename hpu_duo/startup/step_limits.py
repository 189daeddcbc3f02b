"""The limits of steps, from the settings of a user and the sizes of the stores."""

from __future__ import annotations

from graphs import CARD_STEP_TOKENS, StepLimits
from hpu_duo.config.engine import CacheConfig, SchedulerConfig
from hpu_duo.kv.allocations import block_moves
from hpu_duo.kv.host_blocks import fewest_blocks
from hpu_duo.kv.plan import MemoryPlan
from hpu_duo.startup.offloading import host_blocks, staged_units


def resolve_limits(
    scheduler: SchedulerConfig,
    memory: MemoryPlan,
    max_len: int,
    *,
    caches_prefixes: bool = False,
    reads_slice: bool = True,
    is_card: bool = False,
    chunk_grid: int = 0,
    last_chunk: int = 0,
    shares_blocks: bool = False,
    cache: CacheConfig | None = None,
) -> StepLimits:
    """Resolve the limits of steps, from the user's settings and the sizes of the stores.

    Args:
        max_len: most tokens of a request that the model allows.
        caches_prefixes: whether blocks are cached for later requests.
        reads_slice: whether a step costs what the slice of the store costs up to the last block it reads, so
            that blocks have to lie densely.
        is_card: whether a step of few tokens is expensive: on all devices except CPUs.
        chunk_grid, last_chunk, shares_blocks: see ``StepLimits``.
        cache: None = nothing is offloaded.

    Raises:
        ValueError: too few blocks for the configured ``max_model_len``, transfers or ``cpu_attention``.
    """
    moves, decode_len = block_moves(scheduler.max_num_batched_tokens, memory.block_size), scheduler.decode_len
    staged, num_on_host = staged_units(cache, memory, moves), host_blocks(cache, memory)
    fewest = fewest_blocks(moves, scheduler.max_num_seqs)
    # Without a length that is set, requests are as long as all blocks hold.
    longest = -(-(scheduler.max_model_len or max_len) // memory.block_size)
    if num_on_host and memory.num_blocks < min(fewest, scheduler.max_num_seqs * longest):
        raise ValueError(
            f"expected num_blocks of {fewest} or more with cpu_attention, or such a share of the device in "
            "offload_policy, for the new tokens of a step and the last blocks of "
            f"{scheduler.max_num_seqs} requests, got {memory.num_blocks}"
        )
    return StepLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=_held_len(scheduler, memory, max_len, num_on_host - staged.num_blocks),
        block_size=memory.block_size,
        num_blocks=memory.num_blocks,
        uses_blocks=memory.uses_blocks,
        uses_rows=memory.uses_rows,
        can_rewind=memory.can_rewind,
        takes_drafts_back=memory.takes_back(decode_len - 1),
        caches_prefixes=caches_prefixes,
        num_snapshots=memory.num_snapshots,
        num_staged_blocks=staged.num_blocks,
        num_staged_rows=staged.num_rows,
        max_block_moves=moves if caches_prefixes and reads_slice and memory.uses_blocks else 0,
        max_chunk_rows=scheduler.max_chunk_rows,
        step_tokens=CARD_STEP_TOKENS if is_card else 0,
        decode_len=decode_len,
        # On a grid, tokens of a prompt are never computed as those of a decode. States of which drafts are
        # taken back are computed for all tokens of a step with prompts.
        draft_lens=scheduler.draft_lens
        or ((1, decode_len) if (chunk_grid or not memory.can_rewind) and decode_len > 1 else ()),
        chunk_grid=chunk_grid,
        last_chunk=last_chunk,
        num_regions=memory.num_regions,
        shares_blocks=shares_blocks and chunk_grid > 0,
        uses_block_positions=memory.uses_block_positions,
        uses_token_classes=memory.uses_token_classes,
    )


def _held_len(scheduler: SchedulerConfig, memory: MemoryPlan, max_len: int, num_further: int) -> int:
    """Return ``max_len``, or fewer tokens if fewer fit into the blocks and the length is not configured.

    Args:
        num_further: blocks besides those of the plan; below 0 if some of those are not for requests.
    """
    num_blocks = memory.num_blocks + num_further
    held = num_blocks * memory.block_size if memory.uses_blocks else None
    # The last token of a request is sampled and never cached.
    if held is None or max_len <= held + 1:
        return max_len
    if scheduler.max_model_len is not None:
        raise ValueError(
            f"max_model_len={max_len} needs {max_len - 1} cached tokens, but {num_blocks} blocks of "
            f"{memory.block_size} hold {held}"
        )
    return held + 1
