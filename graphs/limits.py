"""Resolved limits of an engine's steps, and the bounds of every reachable batch shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphs.shape import BatchShape, Phase, row_len

CARD_STEP_TOKENS = 400
"""``step_tokens`` of a Gaudi: by the cost model, one of an 8B model on a Gaudi 2, padding included."""


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The limits of the scheduler and of the stores, and the shapes that follow from them.

    Shared by scheduler, bucket tables, planner, warm-up, audit and capacity. Settings that a user did not set
    are resolved here.

    Args:
        max_num_seqs: running requests, hence rows of a step and ring rows.
        max_num_batched_tokens: query tokens of a step; at least ``max_num_seqs``, so that every running
            request can decode in every step.
        max_model_len: tokens of one request, prompt and output.
        block_size: tokens of one block.
        num_blocks: blocks of the store, hence the longest slice of it.
        max_chunk_rows: rows with more than ``decode_len`` tokens and older context that a step may contain;
            without ``uses_rows`` those with the same context count once.
        decode_len: most tokens of a row that decodes.
        draft_lens: tokens of a row that decodes by step: steps without prompts have one of these sizes, which
            ascend up to ``decode_len``, and steps with prompts the first. () = ``decode_len`` in all of them.
        uses_blocks: False for a model whose heads are all streaming: both block counts are then 0.
        uses_rows: False for a model whose heads all keep blocks, and whose layers have no other state.
        can_rewind: False for a model with a state that is right only for all tokens of a prompt it has taken
            in: requests do not fork.
        takes_drafts_back: False for a model with a state that is right only for all tokens of a decode, too:
            ``decode_len`` is 1.
        step_tokens: query tokens that a full step computes in the time of a nearly empty one. A prefix that
            is short relative to them is recomputed if a request would have to wait for it.
        uses_block_positions: steps have the positions of the blocks of the unique part, for heads with a
            rule.
        uses_token_classes: steps have the classes of new tokens, for heads that prefer to store some classes.
        caches_prefixes: requests reuse what earlier ones with the same prefix have computed.
        num_snapshots: further ring rows, for snapshots of cached prefixes.
        num_staged_blocks, num_staged_rows: the last blocks, and the last snapshots, which are reserved for
            transfers between device and host.
        max_block_moves: most blocks that are moved before a step, so that the slice of the unique part has no
            idle blocks.
        chunk_grid: grid of positions at which chunks of a prompt end, because what heads store depends on
            them; chunks end nowhere else but at the end of a prompt, and tokens after a prompt are decoded
            one by one, also in recomputation. 0 = chunks may end anywhere.
        last_chunk: fewest tokens of the last of several chunks; the one before it ends earlier than on the
            grid if needed.
        num_regions: regions of whole prompts, for heads that choose at the end of a prompt; each prompt row
            of a step has one. Shared blocks then count the tokens before a chunk too, whether heads store
            blocks or not.
        shares_blocks: with a grid, other requests with the same prefix compute each whole block of a prompt
            equally, not only whole chunks.

    Raises:
        ValueError: a limit below 1 (``num_blocks`` may be 0 when ``uses_blocks`` is False), or fewer tokens
            than requests decode.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_chunk_rows: int
    decode_len: int
    uses_blocks: bool = True
    uses_rows: bool = True
    can_rewind: bool = True
    takes_drafts_back: bool = True
    caches_prefixes: bool = False
    num_snapshots: int = 0
    num_staged_blocks: int = 0
    num_staged_rows: int = 0
    max_block_moves: int = 0
    chunk_grid: int = 0
    last_chunk: int = 0
    num_regions: int = 0
    shares_blocks: bool = False
    step_tokens: int = 0
    uses_block_positions: bool = False
    uses_token_classes: bool = False
    draft_lens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_lens", lens := tuple(self.draft_lens))
        if lens and (lens[-1] != self.decode_len or lens[0] < 1 or list(lens) != sorted({*lens})):
            raise ValueError(
                f"expected draft_lens that ascend from 1 or more to decode_len={self.decode_len}, got {lens}"
            )
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "block_size",
            "max_chunk_rows",
            "decode_len",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs * self.decode_len:
            raise ValueError(
                f"expected max_num_batched_tokens of at least max_num_seqs={self.max_num_seqs}"
                + (f" times decode_len={self.decode_len}" if self.decode_len > 1 else "")
                + f", got {self.max_num_batched_tokens}"
            )
        for name in ("num_snapshots", "max_block_moves", "step_tokens", "last_chunk", "num_regions"):
            if getattr(self, name) < 0:
                raise ValueError(f"expected {name} >= 0, got {getattr(self, name)}")
        if self.chunk_grid:
            self._check_grid()
        if self.decode_len > 1 and not self.takes_drafts_back:
            raise ValueError(
                "expected decode_len=1 for a model with states that cannot take tokens back, got "
                f"decode_len={self.decode_len}" + (" for drafts" if self.draft_lens else "")
            )
        if not self.can_rewind and self.prompt_decode_len > 1:
            raise ValueError(
                "expected steps with prompts to have no drafts (draft_lens from 1 on) for a model with "
                f"states, got rows of {self.prompt_decode_len} tokens"
            )
        if self.num_regions not in (0, self.max_chunk_rows):
            raise ValueError(
                f"expected a region for each of max_chunk_rows={self.max_chunk_rows}, got {self.num_regions}"
            )
        lowest = 1 if self.uses_blocks else 0
        if self.num_blocks < lowest:
            raise ValueError(
                f"expected num_blocks >= {lowest} with uses_blocks={self.uses_blocks}, got {self.num_blocks}"
            )

    def _check_grid(self) -> None:
        """Validate that every running request gets its whole chunk or its decode in every step."""
        # If every prompt is one chunk, none is running, and a new one may wait.
        chunks = 1 if self.chunk_grid >= self.max_model_len else min(self.max_chunk_rows, self.max_num_seqs)
        needed = chunks * self.chunk_grid + self.max_num_seqs - chunks
        if (
            self.chunk_grid < (fewest := max(2, self.last_chunk + 1))
            or self.prompt_decode_len > 1
            or self.max_num_batched_tokens < needed
        ):
            raise ValueError(
                f"expected chunks of {fewest} tokens or more, steps with prompts of one token in rows that "
                f"decode, and max_num_batched_tokens of {chunks} chunks and a token of each other request, "
                f"{needed}, got chunks of {self.chunk_grid}, rows of {self.prompt_decode_len} tokens and "
                f"max_num_batched_tokens={self.max_num_batched_tokens}"
            )

    @property
    def prefix_grid(self) -> int:
        """Grid of positions up to which prompts with the same prefix are computed equally.

        0 = at every token.
        """
        # States of rows exist only where chunks end.
        by_block = self.chunk_grid and self.shares_blocks and not self.uses_rows
        return self.block_size if by_block else self.chunk_grid

    @property
    def num_ring_rows(self) -> int:
        """Ring rows of requests and of snapshots, without the null unit."""
        return self.max_num_seqs + self.num_snapshots

    @property
    def blocks_per_request(self) -> int:
        """Blocks of a request at ``max_model_len``."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_decode_tokens(self) -> int:
        """Query tokens of a decode-only step."""
        return self.max_num_seqs * self.decode_len

    @property
    def prompt_decode_len(self) -> int:
        """Most tokens of a row that decodes in a step with prompts."""
        return self.draft_lens[0] if self.draft_lens else self.decode_len

    @property
    def without_drafts(self) -> StepLimits:
        """The limits of steps in which every row decodes as many tokens as in a step with prompts."""
        return replace(self, decode_len=self.prompt_decode_len, draft_lens=())

    def row_len(self, shape: BatchShape) -> int:
        """Tokens of a row that decodes in a step of this shape."""
        return row_len(shape, self.decode_len, self.draft_lens)

    def fewest_tokens(self, phase: Phase) -> int:
        """Query tokens of the smallest step of a phase."""
        if not phase.causal:
            return 1
        return self.prompt_decode_len + (2 if phase.unique else 1)

    @property
    def max_unique_blocks(self) -> int:
        """Longest slice that the unique part can read."""
        return self.num_blocks if self.uses_blocks else 0

    def max_shared_blocks(self, phase: Phase) -> int:
        """Most blocks that the shared part of a phase can gather; 0 when it has none.

        All context blocks of a row that does not decode are shared. A block of decode rows is shared only if
        at least two of them have it, so ``r`` such rows share at most half of their blocks. With regions, it
        is at least the blocks of the longest text before a chunk.
        """
        of_regions = self.blocks_per_request if self.num_regions and phase.causal and phase.shared else 0
        if not (phase.shared and self.uses_blocks):
            return of_regions
        rows = self.max_num_seqs
        chunk_rows = min(self.max_chunk_rows, rows) if phase.causal else 0
        decode_rows = rows - chunk_rows if phase.unique else 0
        half_blocks = 2 * chunk_rows + decode_rows
        return max(of_regions, min(self.blocks_per_request * half_blocks // 2, self.num_blocks))

    @property
    def reachable_phases(self) -> tuple[Phase, ...]:
        """Phases that a step can have.

        Decode rows always need the unique part, for their own keys at least; rows with more tokens
        always need the causal part. So ``-s-`` and ``---`` cannot occur, and ``-su`` needs two rows and
        blocks.
        """
        wanted = []
        if self.max_num_batched_tokens > self.prompt_decode_len:
            wanted += ["c--", "cs-"]
        if self.max_num_batched_tokens > self.prompt_decode_len + 1 and self.max_num_seqs > 1:
            wanted += ["c-u", "csu"]
        wanted += ["--u"]
        if self.max_num_seqs > 1 and self.uses_blocks:
            wanted += ["-su"]
        return tuple(sorted(map(Phase.parse, wanted)))

    def largest_of(self, phase: Phase) -> BatchShape:
        """The shape of a phase with every size at its limit: it holds all reachable shapes of that phase."""
        query_len = self.max_num_batched_tokens if phase.causal else self.max_decode_tokens
        return BatchShape(
            phase,
            query_len,
            self.max_shared_blocks(phase),
            self.max_unique_blocks if phase.unique else 0,
            min(self.max_num_seqs, query_len),
        )

    @property
    def largest(self) -> BatchShape:
        """The smallest shape that holds every reachable one; sizes the staged inputs."""
        shapes = [self.largest_of(phase) for phase in self.reachable_phases]
        largest = shapes[0]
        for shape in shapes[1:]:
            largest |= shape
        return largest

    def reaches(self, shape: BatchShape) -> bool:
        """Whether a scheduler within these limits may produce the exact, unpadded ``shape``.

        The bounds on blocks are those of ``largest_of``: every step of the engine is inside, and a few
        shapes inside may never occur.
        """
        if shape.phase not in self.reachable_phases or not self.largest_of(shape.phase).holds(shape):
            return False
        if not shape.phase.causal:
            return shape.num_logits * self.decode_len >= shape.query_len
        fewest_tokens = self.fewest_tokens(shape.phase)
        return shape.query_len >= fewest_tokens and 1 <= shape.num_logits <= shape.query_len
