"""The sizes of a model that its cost depends on, and figures of Gaudi 2 and Gaudi 3 from public sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from bias_builders import Window
from hpu_duo.heads import CountRule, fewest_promotions
from hpu_duo.heads.binarise import check_sparsity, round_half_up

if TYPE_CHECKING:
    from hpu_duo.kv.plan import LayerKV
    from kernels_ref import Recurrence


_GIB = 1 << 30


class Format(Enum):
    """Format in which numbers are stored and multiplied."""

    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def num_bytes(self) -> float:
        """Bytes of one element; of int4 with its share of a scale in bf16 for 128 elements."""
        return {Format.BF16: 2, Format.FP8: 1, Format.INT8: 1, Format.INT4: 0.5 + 2 / 128}[self]

    @property
    def bytes_per_output(self) -> int:
        """Bytes of the scale of an output of a linear layer, in bf16."""
        return 2 if self in (Format.FP8, Format.INT8) else 0

    @property
    def arithmetic(self) -> Format:
        """The format of products with such weights: integers are read as bf16."""
        return Format.FP8 if self is Format.FP8 else Format.BF16

    @classmethod
    def parse(cls, text: str) -> Format:
        """The format of a name; ValueError for any but bf16 (or bfloat16), fp8, int8 and int4."""
        name = text.strip().lower()
        for known in cls:
            if name == known.value or (known is cls.BF16 and name == "bfloat16"):
                return known
        raise ValueError(f"expected the format bf16, fp8, int8 or int4, got {text!r}")


@dataclass(frozen=True)
class Hardware:
    """One accelerator, and its place in a box of ``max_devices``.

    Rates are per second and device. None of them was measured by this project.

    Attributes:
        name: on the command line.
        title: for reports.
        nominal_bf16, nominal_fp8: dense matrix operations, as the vendor states them.
        reached_bf16, reached_fp8: best published rates of large products; the roofs of the cost model.
        vector_ops: bf16 operations of the vector engine.
        memory_bytes: device memory that start-up logs show as usable.
        memory_bytes_per_s: of device memory, as the vendor states it.
        pair_bytes_per_s: between two devices of a box, in one direction.
        max_devices: in one box.
        on_chip_bytes: of the memory that operators of a graph share.
        sources: of the figures.
    """

    name: str
    title: str
    nominal_bf16: float
    nominal_fp8: float
    reached_bf16: float
    reached_fp8: float
    vector_ops: float
    memory_bytes: int
    memory_bytes_per_s: float
    pair_bytes_per_s: float
    max_devices: int
    on_chip_bytes: int
    sources: tuple[str, ...]

    def check_devices(self, num_devices: int) -> None:
        """Raise ValueError unless one box has that many devices."""
        if not 1 <= num_devices <= self.max_devices:
            raise ValueError(f"expected 1 to {self.max_devices} {self.title} devices, got {num_devices}")


GAUDI2 = Hardware(
    name="gaudi2",
    title="Gaudi 2",
    nominal_bf16=432e12,
    nominal_fp8=865e12,
    reached_bf16=418.7e12,
    reached_fp8=826.5e12,
    vector_ops=11e12,
    memory_bytes=round(94.62 * _GIB),
    memory_bytes_per_s=2.46e12,
    pair_bytes_per_s=37.5e9,
    max_devices=8,
    on_chip_bytes=48 << 20,
    sources=(
        "nominal operations, memory bandwidth, on-chip memory: Intel, Gaudi 2 white paper",
        "reached operations: stas00/ml-engineering, compute/accelerator, MAMF table",
        "vector engine: arXiv 2501.00210",
        "usable memory: start-up log in the documentation of vllm-gaudi",
        "links: 21 of 24 ports of 100 Gbit/s, three to each of seven peers",
    ),
)

GAUDI3 = Hardware(
    name="gaudi3",
    title="Gaudi 3",
    nominal_bf16=1835e12,
    nominal_fp8=1835e12,
    reached_bf16=1243e12,
    reached_fp8=1289.5e12,
    vector_ops=28.7e12,
    memory_bytes=round(126.5 * _GIB),
    memory_bytes_per_s=3.7e12,
    pair_bytes_per_s=75e9,
    max_devices=8,
    on_chip_bytes=96 << 20,
    sources=(
        "nominal operations, vector engine, memory bandwidth: Intel, Gaudi 3 white paper and Hot Chips 2024",
        "on-chip memory: Hot Chips 2024",
        "reached operations: stas00/ml-engineering, compute/accelerator, MAMF table",
        "usable memory: vllm-project/vllm-gaudi pull request 1736",
        "links: 21 of 24 ports of 200 Gbit/s, three to each of seven peers",
    ),
)

_BY_NAME = {hardware.name: hardware for hardware in (GAUDI2, GAUDI3)}
HARDWARE_NAMES = tuple(_BY_NAME)


def find_hardware(name: str) -> Hardware:
    """The accelerator of that name; ValueError when it is unknown."""
    if name not in _BY_NAME:
        raise ValueError(f"expected hardware {' or '.join(HARDWARE_NAMES)}, got {name!r}")
    return _BY_NAME[name]


@dataclass(frozen=True)
class AttentionSize:
    """Attention of one layer.

    Attributes:
        num_heads, num_kv_heads: query heads, and key/value heads.
        head_dim: elements of a key.
        window: of a layer with a sliding window.
        value_head_dim: elements of a value; None = ``head_dim``.
        source: number of the layer whose keys and values it attends to; None = its own.
        latent: elements of the latent that its keys and values are expanded from, and of its rotary part;
            None = they are not.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    value_head_dim: int | None = None
    source: int | None = field(default=None, compare=False)
    latent: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"expected num_heads to be a multiple of {self.num_kv_heads} KV heads, got {self.num_heads}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"expected a window of 1 token or more, got {self.window}")

    @property
    def value_dim(self) -> int:
        """Elements of a value."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    def has_window(self, max_len: int) -> bool:
        """Whether all heads stream: a window no shorter than any request is full attention."""
        return self.window is not None and self.window < max_len


@dataclass(frozen=True)
class Experts:
    """Weights of experts, of which a token uses a part.

    Attributes:
        num_params: of all experts of all layers.
        num_experts: of one layer.
        num_per_token: experts that a token is sent to.
    """

    num_params: int = 0
    num_experts: int = 1
    num_per_token: int = 1

    def __post_init__(self) -> None:
        if self.num_params < 0 or not 1 <= self.num_per_token <= self.num_experts:
            raise ValueError(f"expected 1 <= num_per_token <= num_experts and num_params >= 0, got {self}")

    @property
    def share_per_token(self) -> float:
        """Part of the experts that one token uses."""
        return self.num_per_token / self.num_experts

    def share_read(self, num_tokens: int) -> float:
        """Part of the experts that at least one of ``num_tokens`` tokens uses, if routing is uniform."""
        return 1.0 - (1.0 - self.share_per_token) ** num_tokens


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a decoder-only model that bytes and operations follow from.

    Attributes:
        name: for reports.
        layers: attention of each decoder layer.
        hidden_size, vocab_size: of the model.
        matrix_params: weights that every token is multiplied with, without output head and experts.
        other_params: weights that are looked up or added: embedding table, norms, biases. The table is not
            counted if it is also the output head.
        max_positions: tokens of the longest request.
        experts: of mixture-of-experts layers.
        structures: a number for each layer, equal for those that differ in their attention's sizes at most;
            empty: all are equal.
        matrix_outputs: outputs of the matrices of ``matrix_params``, which have scales if weights are fp8 or
            int8; those of experts are not counted.
        stored_bytes: of all weights of a quantised checkpoint, as its files store them; None for plain ones,
            or without files.
        states: kinds of states of a request in each layer that has these instead of keys and values.
        numbers: of ``layers`` among all layers; empty if all attend.
        num_all: number of all layers, where ``numbers`` has some.
    """

    name: str
    layers: tuple[AttentionSize, ...]
    hidden_size: int
    vocab_size: int
    matrix_params: int
    other_params: int
    max_positions: int
    experts: Experts = Experts()
    structures: tuple[int, ...] = ()
    matrix_outputs: int = 0
    stored_bytes: int | None = None
    states: tuple[tuple[Recurrence, ...], ...] = ()
    numbers: tuple[int, ...] = ()
    num_all: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("expected at least one layer, got none")
        if self.structures and len(self.structures) != len(self.layers):
            raise ValueError(f"expected {len(self.layers)} structures, got {len(self.structures)}")
        for name in ("hidden_size", "vocab_size", "matrix_params", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")

    @property
    def num_layers(self) -> int:
        """All layers, those with states only among them."""
        return len(self.layers) + len(self.states)

    @property
    def head_params(self) -> int:
        """Weights of the output head."""
        return self.hidden_size * self.vocab_size

    @property
    def num_params(self) -> int:
        """All weights."""
        return self.matrix_params + self.head_params + self.other_params + self.experts.num_params

    def weight_bytes(self, weights: Format) -> int:
        """Bytes of all weights when layers are stored in ``weights`` and the rest in bf16.

        Output head, embedding table, norms and biases stay in bf16, as quantised checkpoints have them.
        Scales are counted. A quantised checkpoint has its own bytes where ``weights`` is bf16.
        """
        if weights is Format.BF16 and self.stored_bytes is not None:
            return self.stored_bytes
        in_layers = self.matrix_params + self.experts.num_params
        scales = self.matrix_outputs * weights.bytes_per_output
        rest = (self.head_params + self.other_params) * Format.BF16.num_bytes
        return round(in_layers * weights.num_bytes + scales + rest)

    def layer_bytes(self, weights: Format) -> float:
        """Bytes of the weights of a layer in the mean; embedding table, output head and norms are in none."""
        rest = (self.head_params + self.other_params) * Format.BF16.num_bytes
        return max(0.0, self.weight_bytes(weights) - rest) / self.num_layers

    @cached_property
    def num_full_kv_heads(self) -> int:
        """KV heads stored by layers without a sliding window: those that a head pattern can let stream."""
        stored = (layer for layer in self.layers if layer.window is None and layer.source is None)
        return sum(layer.num_kv_heads for layer in stored)

    def check_split(self, num_devices: int) -> None:
        """Raise ValueError unless the KV heads of every layer divide evenly among the devices."""
        for layer in self.layers:
            if layer.num_kv_heads % num_devices:
                raise ValueError(
                    f"expected a number of devices that divides {layer.num_kv_heads} KV heads, "
                    f"got {num_devices}"
                )

    def spread(self, sparsity: float) -> tuple[int, ...]:
        """Retrieval heads of each layer when a share of the KV heads streams, without a pattern.

        Of the ``n`` heads of layers without a window, ``round(n * (1 - sparsity))`` retrieve, as with a
        pattern, spread evenly: no two such layers differ by more than the rounding. Layers with a window
        count as full; layers that read the keys of another one have its heads.

        Raises:
            ValueError: sparsity outside 0 to 1.
        """
        num_retrieval = round_half_up(self.num_full_kv_heads, check_sparsity(sparsity))
        counts: list[int] = []
        seen = 0
        for layer in self.layers:
            if layer.source is not None:
                counts.append(counts[layer.source])
                continue
            if layer.window is not None:
                counts.append(layer.num_kv_heads)
                continue
            # Heads [0, seen) include floor(seen * share) retrieval heads: no layer is off by more than one.
            before = seen * num_retrieval // self.num_full_kv_heads
            seen += layer.num_kv_heads
            counts.append(seen * num_retrieval // self.num_full_kv_heads - before)
        return tuple(counts)

    def few_kinds(
        self, counts: Sequence[int], max_layer_kinds: int | None, max_len: int, num_ranks: int = 1
    ) -> tuple[int, ...]:
        """Retrieval heads of each layer, some promoted as an engine would: see ``hpu_duo.heads.binarise``.

        Args:
            max_layer_kinds: at least the number of structures of layers; None is no bound.
            num_ranks: ranks that share the retrieval heads of a layer evenly.
        """
        structures = [(kind, layer, layer.has_window(max_len)) for kind, layer in self._structures]
        if max_layer_kinds is not None:
            max_layer_kinds = max(max_layer_kinds, len(set(structures)))
        needed = [0 if windowed else count for count, (_, _, windowed) in zip(counts, structures)]
        chosen = fewest_promotions(needed, CountRule(max_layer_kinds, num_ranks), structures)
        found = [old if windowed else new for old, new, (_, _, windowed) in zip(counts, chosen, structures)]
        return tuple(found[number] for number in self.sources)

    @property
    def sources(self) -> tuple[int, ...]:
        """Number of the layer whose keys and values each layer attends to."""
        given = ((number, layer.source) for number, layer in enumerate(self.layers))
        return tuple(number if source is None else source for number, source in given)

    def num_kinds(self, kv_layers: Sequence[LayerKV]) -> int:
        """Count the kinds of layers with these heads, each of which is compiled for every bucket."""
        return len(self.kinds(kv_layers))

    def kinds(self, kv_layers: Sequence[LayerKV]) -> list[tuple[AttentionSize, LayerKV]]:
        """Return attention and heads of one layer of each kind."""
        return [(layer, kv) for (_, layer), kv in dict.fromkeys(zip(self._structures, kv_layers))]

    @property
    def _structures(self) -> tuple[tuple[int, AttentionSize], ...]:
        return tuple(zip(self.structures or (0,) * len(self.layers), self.layers))

    def kv_layers(
        self, sparsity: float, sink: int, recent: int, max_len: int, slack: int = 0
    ) -> tuple[LayerKV, ...]:
        """Keys and values of each layer when a share of the KV heads streams, spread evenly.

        Args:
            slack: slots of a ring beyond its window.

        Raises:
            ValueError: sparsity outside 0 to 1, ``sink`` below 0, ``recent`` or ``max_len`` below 1.
        """
        return self.kv_layers_of(self.spread(sparsity), sink, recent, max_len, slack)

    def kv_layers_of(
        self, counts: Sequence[int], sink: int, recent: int, max_len: int, slack: int = 0
    ) -> tuple[LayerKV, ...]:
        """Keys and values of each layer with ``counts`` retrieval heads, whichever heads these are.

        Layers with a window shorter than ``max_len`` are not affected by the counts.

        Args:
            slack: slots of a ring beyond its window.

        Raises:
            ValueError: ``sink`` below 0, ``recent`` or ``max_len`` below 1.
        """
        if sink < 0 or recent < 1 or max_len < 1:
            raise ValueError(
                f"expected sink >= 0, recent >= 1 and max_len >= 1, got {sink}, {recent} and {max_len}"
            )
        # It imports kinds of heads, and so torch.
        from hpu_duo.kv.plan import LayerKV, head_groups, with_latents

        # A sink has a slot and a score, as any other token.
        ring = Window(0, min(sink + recent, max_len))
        kept: list[LayerKV] = []
        for layer, count in zip(self.layers, counts, strict=True):
            num_kv = layer.num_kv_heads
            if layer.has_window(max_len):
                assert layer.window is not None
                groups = head_groups(0, num_kv, Window(0, layer.window), slack)
            else:
                groups = head_groups(count, num_kv - count, ring, slack)
            groups = with_latents(groups, layer.latent)
            kept.append(LayerKV(groups, layer.head_dim, layer.value_head_dim, source=layer.source))
        return tuple(kept)


PLAIN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types with numbers of parameters that follow from their sizes."""


def plain_model(
    name: str, config: Any, layers: tuple[AttentionSize, ...], max_positions: int
) -> ModelSize | None:
    """Count a model of equal layers of four projections, a gated MLP and two norms; None for any other.

    Args:
        config: transformers', of one of the families or of any other.
        layers: sizes of the attention of each layer.
    """
    family = config.model_type
    if family not in PLAIN_FAMILIES or len(set(layers)) != 1:
        return None
    hidden, inner, num_layers = config.hidden_size, config.intermediate_size, len(layers)
    queries = layers[0].num_heads * layers[0].head_dim
    keys = layers[0].num_kv_heads * layers[0].head_dim
    matrices = 2 * hidden * (queries + keys) + 3 * hidden * inner
    other = 2 * hidden
    if family == "qwen2":
        other += queries + 2 * keys
    elif family != "mistral" and config.attention_bias:
        other += queries + 2 * keys + hidden
    if family == "llama" and config.mlp_bias:
        other += 2 * inner + hidden
    if family == "qwen3":  # norms of queries and keys
        other += 2 * layers[0].head_dim
    table = 0 if config.tie_word_embeddings else config.vocab_size * hidden
    return ModelSize(
        name=name,
        layers=layers,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        matrix_params=num_layers * matrices,
        other_params=num_layers * other + hidden + table,
        max_positions=max_positions,
        matrix_outputs=num_layers * (queries + 2 * keys + 2 * hidden + 2 * inner),
    )


class TableMemory(NamedTuple):
    """Memory that the graphs of a table keep on one device, if each has intermediates of its own.

    Attributes:
        num_graphs: buckets of the table, and those of drafts that the model makes.
        kept_bytes: sum over the table, with the portable kernels.
        kept_blocks: KV blocks that would fit there instead; 0 where no head needs any.
        fused_bytes, fused_blocks: the same with fused operators.
        reserved_bytes: set aside for graphs, beside the KV cache.
    """

    num_graphs: int
    kept_bytes: int
    kept_blocks: int
    fused_bytes: int
    fused_blocks: int
    reserved_bytes: int

    def describe(self) -> str:
        """Describe it in words, with what is not reserved."""
        reserved = self.reserved_bytes / _GIB
        text = (
            f"{self.num_graphs} graphs keep up to {self.kept_bytes / _GIB:.1f} GiB on each device if each "
            f"has intermediates of its own, as much as {self.kept_blocks:,} KV blocks; with fused operators "
            f"{self.fused_bytes / _GIB:.1f} GiB, {self.fused_blocks:,} blocks; {reserved:.1f} GiB are "
            "reserved"
        )
        missing = max(self.kept_bytes, self.fused_bytes) - self.reserved_bytes
        return f"{text}, up to {missing / _GIB:.1f} GiB too few." if missing > 0 else f"{text}."
