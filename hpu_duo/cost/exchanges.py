"""Bytes that ranks exchange in a layer whose retrieval heads' blocks are dealt out over them.

Counts what ``hpu_duo.sharded.HeadExchange`` does; ``tests/ranks/test_context.py`` holds both together.
"""

from __future__ import annotations

from typing import NamedTuple

from graphs import BatchShape

_FLOAT32 = 4


class HeadExchanges(NamedTuple):
    """Bytes that one rank gives to the exchanges of one layer, and the number of these.

    Attributes:
        gathered: bytes that every other rank gets: new keys and values, queries, and the partial results of
            decodes where no prompt continues.
        scattered: bytes of which every other rank gets its part, one of so many as there are ranks: partial
            results where a prompt continues.
        number: of exchanges.
    """

    gathered: int = 0
    scattered: int = 0
    number: int = 0

    def bytes_to_each(self, num_ranks: int) -> float:
        """Bytes that go from a rank to each other one."""
        return self.gathered + self.scattered / num_ranks


def head_exchanges(
    num_heads: int,
    group_size: int,
    head_dim: int,
    dtype_bytes: int,
    bucket: BatchShape,
    decode_len: int,
    num_ranks: int,
) -> HeadExchanges:
    """Return the exchanges of a layer in a step.

    Args:
        num_heads: retrieval heads of all ranks; those of a rank are padded to the most that one has.
        group_size: query heads of each.
    """
    if not num_heads or num_ranks == 1:
        return HeadExchanges()
    most, phase = -(-num_heads // num_ranks), bucket.phase
    num_rows = bucket.num_logits * decode_len if phase.unique else 0
    has_shared = phase.shared and bucket.num_shared_blocks > 0
    num_asked = bucket.query_len if has_shared else num_rows
    vectors = 2 * bucket.query_len + group_size * num_asked
    gathered = most * vectors * head_dim * dtype_bytes
    triple = group_size * (head_dim + 2) * _FLOAT32
    if has_shared:
        scattered = (bucket.query_len + num_rows) * num_ranks * most * triple
        return HeadExchanges(gathered, scattered, 2)
    if num_rows:
        return HeadExchanges(gathered + num_rows * num_heads * triple, 0, 2)
    return HeadExchanges(gathered, 0, 1)
