"""Measured shapes: models, their head patterns, and the sizes of each section."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """Largest gains over full attention in DuoAttention's efficiency section (arXiv:2410.10819), on an A100.

    Attributes:
        decode, prefill: how many times faster.
        memory, prefill_memory: how many times less memory, weights included.
        prefill_context: prompt tokens of the prefill measurements.
    """

    decode: float
    memory: float
    prefill: float
    prefill_memory: float
    prefill_context: int


@dataclass(frozen=True)
class ModelShape:
    """A Llama by its sizes; weights are random.

    Attributes:
        retrieval_share: share of key/value heads that keep the whole context.
        sink, recent: window of the others.
    """

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    retrieval_share: float
    published: Published
    sink: int = 64
    recent: int = 256

    @property
    def head_dim(self) -> int:
        """Elements of a key."""
        return self.hidden_size // self.num_heads

    @property
    def group_size(self) -> int:
        """Query heads of a key/value head."""
        return self.num_heads // self.num_kv_heads


_MHA = Published(decode=2.18, memory=2.55, prefill=1.73, prefill_memory=2.38, prefill_context=100_000)
_GQA = Published(decode=1.50, memory=1.67, prefill=1.63, prefill_memory=1.53, prefill_context=320_000)

LLAMA_2_7B = ModelShape("Llama-2-7B", 4096, 32, 32, 32, 11_008, 32_000, 0.25, _MHA)
LLAMA_3_8B = ModelShape("Llama-3-8B", 4096, 32, 32, 8, 14_336, 128_256, 0.5, _GQA)

_TOY_MHA = ModelShape("toy MHA", 64, 2, 4, 4, 96, 128, 0.25, _MHA, sink=4, recent=12)
_TOY_GQA = ModelShape("toy GQA", 64, 2, 4, 2, 96, 128, 0.5, _GQA, sink=4, recent=12)


@dataclass(frozen=True)
class Sizes:
    """Every size of a run.

    Attributes:
        models: whose curves are drawn, and whose heads the kernels get.
        copy_bytes, matrix: the copy and the square product that measure the machine.
        block_size: tokens of a block.
        unique_context: of the unique part alone.
        ragged: batches of contexts, by name.
        causal: prompt tokens of the causal part.
        chunk, shared_context: queries and context of the shared part.
        ring_rows: rows of the unique rings.
        budget_context, budget_slots: of decodes with full attention, and of heads with a budget beside them.
        budget_rows: numbers of rows of these decodes.
        decode_contexts, decode_steps: of the decode curves.
        prefill_chunks: of the prefill curves.
        format_contexts: batches of contexts of one size, for formats of keys and values.
        copied_bytes: of one copy between host and device.
        offload_context: tokens that leave to the host, and come back.
        prefill_context: instead of the published one, None for that.
    """

    models: tuple[ModelShape, ...]
    copy_bytes: int
    matrix: int
    block_size: int
    unique_context: int
    ragged: tuple[tuple[str, tuple[int, ...]], ...]
    causal: int
    chunk: int
    shared_context: int
    ring_rows: int
    budget_context: int
    budget_slots: int
    budget_rows: tuple[int, ...]
    decode_contexts: tuple[int, ...]
    decode_steps: int
    prefill_chunks: tuple[int, ...]
    format_contexts: tuple[tuple[int, ...], ...]
    copied_bytes: int
    offload_context: int
    prefill_context: int | None = None


_K = 1024

REAL = Sizes(
    models=(LLAMA_2_7B, LLAMA_3_8B),
    copy_bytes=4 << 30,
    matrix=8192,
    block_size=128,
    unique_context=128 * _K,
    ragged=(
        ("one of 128K, 31 of 1K", (128 * _K, *[_K] * 31)),
        ("32 of 8K", (8 * _K,) * 32),
        ("256K, halved down to 1K", tuple(256 * _K >> i for i in range(9))),
        ("33 of 1K", (_K,) * 33),
    ),
    causal=8 * _K,
    chunk=2 * _K,
    shared_context=32 * _K,
    ring_rows=32,
    budget_context=16 * _K,
    budget_slots=3277,
    budget_rows=(1, 16),
    decode_contexts=(
        *(n * _K for n in (4, 16, 32, 64)),
        100_000,
        *(n * _K for n in (128, 192, 256, 512, 1024)),
    ),
    decode_steps=20,
    prefill_chunks=(4 * _K, 8 * _K, 16 * _K, 32 * _K),
    format_contexts=((16 * _K,), (128 * _K,), (16 * _K,) * 8),
    copied_bytes=256 << 20,
    offload_context=128 * _K,
)

TOY = Sizes(
    models=(_TOY_MHA, _TOY_GQA),
    copy_bytes=1 << 20,
    matrix=64,
    block_size=16,
    unique_context=40,
    ragged=(("one of 40, 2 of 10", (40, 10, 10)),),
    causal=24,
    chunk=16,
    shared_context=32,
    ring_rows=2,
    budget_context=80,
    budget_slots=16,
    budget_rows=(2,),
    decode_contexts=(64, 160),
    decode_steps=2,
    prefill_chunks=(24, 48),
    format_contexts=((40,),),
    copied_bytes=1 << 16,
    offload_context=40 * 16,
    prefill_context=100,
)
