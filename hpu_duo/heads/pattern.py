"""The head pattern: a score for every KV head, its files, the choice of retrieval heads, and their order."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpu_duo.heads.binarise import (
    Balance,
    TieBreak,
    check_sparsity,
    keep_above,
    keep_by_noisy_quantile,
    keep_strongest,
)

SCORES_FILE = "full_attention_heads.tsv"
CONFIG_FILE = "config.json"
# Not part of the published format: an additional file, so that a run can be repeated without the rule.
RETRIEVAL_FILE = "retrieval_heads.tsv"


def read_directory(directory: Path) -> tuple[NDArray[np.float64], NDArray[np.float64] | None, dict[str, Any]]:
    """Read the scores [L, K], the 0/1 mask [L, K] if there is one, and the configuration.

    Raises ValueError for a missing or malformed file, naming it; the configuration must have ``sink_size``
    and ``recent_size``.
    """
    missing = [name for name in (SCORES_FILE, CONFIG_FILE) if not (directory / name).is_file()]
    if missing:
        raise ValueError(
            f"expected {SCORES_FILE} and {CONFIG_FILE} in {directory}, got no {', '.join(missing)}"
        )
    mask_file = directory / RETRIEVAL_FILE
    return (
        _read_table(directory / SCORES_FILE),
        _read_table(mask_file) if mask_file.is_file() else None,
        _read_config(directory / CONFIG_FILE),
    )


def write_directory(
    directory: Path, scores: NDArray[Any], retrieval: NDArray[np.bool_] | None, config: Mapping[str, Any]
) -> None:
    """Write what ``read_directory`` reads, creating the directory; without a mask, remove an old one."""
    directory.mkdir(parents=True, exist_ok=True)
    np.savetxt(directory / SCORES_FILE, scores, delimiter="\t")
    (directory / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    if retrieval is None:
        (directory / RETRIEVAL_FILE).unlink(missing_ok=True)
    else:
        np.savetxt(directory / RETRIEVAL_FILE, retrieval, fmt="%d", delimiter="\t")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8 text in {path}, got: {error}") from error


def _read_config(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"expected JSON in {path}, got: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"expected an object in {path}, got {type(config).__name__}")
    missing = [key for key in ("sink_size", "recent_size") if key not in config]
    if missing:
        raise ValueError(
            f"expected the keys sink_size and recent_size in {path}, got no {', '.join(missing)}"
        )
    return config


def _read_table(path: Path) -> NDArray[np.float64]:
    lines = _read_text(path).splitlines()
    try:
        rows = [[float(cell) for cell in line.split("\t")] for line in lines if line.strip()]
    except ValueError as error:
        raise ValueError(f"expected tab-separated numbers in {path}, got: {error}") from error
    widths = sorted({len(row) for row in rows})
    if len(widths) != 1:
        raise ValueError(f"expected lines of one length in {path}, got {len(rows)} lines of lengths {widths}")
    return np.array(rows, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class HeadPattern:
    """Scores of KV heads, by their need of the whole context, and, once binarised, the heads that get it.

    A pattern is *raw* while ``retrieval`` is None and *binarised* once it is set; ``binarise`` converts the
    first to the second. Arrays are copied in and read-only. Two patterns are equal when all their values are.

    Attributes:
        scores: [L, K], finite; higher needs more context. Stored as float32, unclipped.
        sink: tokens at the start of a request that a streaming head stores, >= 0.
        recent: newest tokens that a streaming head stores, the current one included, >= 1.
        source: origin of the scores, for logs and reports.
        retrieval: bool [L, K], True for a retrieval head; None for a raw pattern.
        promoted: bool [L, K], the retrieval heads that ``promote`` has added; None is none. Patterns that
            differ in nothing else are equal.
        config: the keys of the pattern's ``config.json``, stored for ``save``; the sizes are in ``sink`` and
            ``recent``.
    """

    scores: NDArray[np.floating]
    sink: int
    recent: int
    source: str = "given"
    retrieval: NDArray[np.bool_] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    promoted: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        scores = np.array(self.scores, dtype=np.float32)
        if scores.ndim != 2 or scores.size == 0:
            raise ValueError(f"expected scores of shape [num_layers, num_kv_heads], got {list(scores.shape)}")
        if not np.isfinite(scores).all():
            layer, head = np.argwhere(~np.isfinite(scores))[0]
            raise ValueError(
                f"expected finite scores, got {scores[layer, head]} at layer {layer}, head {head}"
            )
        scores.setflags(write=False)
        object.__setattr__(self, "scores", scores)
        object.__setattr__(self, "sink", _count("sink", self.sink, minimum=0))
        object.__setattr__(self, "recent", _count("recent", self.recent, minimum=1))
        object.__setattr__(self, "config", dict(self.config))
        if self.retrieval is not None:
            object.__setattr__(self, "retrieval", _mask("retrieval", self.retrieval, scores.shape))
        if self.promoted is not None:
            object.__setattr__(self, "promoted", _mask("promoted", self.promoted, scores.shape))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeadPattern):
            return NotImplemented
        return (self._key(), self.source, self.config) == (other._key(), other.source, other.config)

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        mask = None if self.retrieval is None else self.retrieval.tobytes()
        # Adding zero turns -0.0 into 0.0, which compare equal but have different bytes.
        return self.scores.shape, (self.scores + np.float32(0)).tobytes(), mask, self.sink, self.recent

    # --- Queries ---

    @property
    def num_layers(self) -> int:
        """Number of layers L."""
        return int(self.scores.shape[0])

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads K of a layer."""
        return int(self.scores.shape[1])

    @property
    def is_binarised(self) -> bool:
        """Whether every head has been decided to be a retrieval or a streaming head."""
        return self.retrieval is not None

    @property
    def mask(self) -> NDArray[np.bool_]:
        """``retrieval`` of a binarised pattern, bool [L, K]; ValueError when the pattern is raw."""
        if self.retrieval is None:
            raise ValueError(f"expected a binarised pattern, got the raw scores of {self.source!r}")
        return self.retrieval

    @property
    def sparsity(self) -> float:
        """Achieved fraction of streaming heads, which rounding and ties may move off the requested one."""
        return 1.0 - float(self.mask.mean())

    @property
    def head_counts(self) -> tuple[tuple[int, int], ...]:
        """``(retrieval, streaming)`` KV heads of each layer; each distinct pair is a compiled shape."""
        return tuple((int(kept), self.num_kv_heads - int(kept)) for kept in self.mask.sum(axis=1))

    @property
    def num_promoted(self) -> int:
        """Retrieval heads that ``promote`` has added."""
        return 0 if self.promoted is None else int(self.promoted.sum())

    def check_shape(self, num_layers: int, num_kv_heads: int) -> None:
        """Raise ValueError unless the pattern is for a model with these numbers of layers and KV heads."""
        if (self.num_layers, self.num_kv_heads) != (num_layers, num_kv_heads):
            raise ValueError(
                f"expected a head pattern of {num_layers} layers x {num_kv_heads} KV heads, "
                f"got {self.num_layers} x {self.num_kv_heads} from {self.source!r}"
            )

    # --- Derived patterns ---

    def of_layers(self, numbers: Sequence[int]) -> HeadPattern:
        """Return the pattern whose layer ``i`` is the layer ``numbers[i]`` of this one."""
        rows = np.array(numbers)
        return replace(
            self,
            scores=self.scores[rows],
            retrieval=None if self.retrieval is None else self.retrieval[rows],
            promoted=None if self.promoted is None else self.promoted[rows],
        )

    def binarise(
        self,
        *,
        sparsity: float | None = None,
        threshold: float | None = None,
        tie_break: TieBreak = "stable",
        seed: int = 0,
        balance: Balance = "global",
        num_ranks: int = 1,
    ) -> HeadPattern:
        """Decide the class of every head from its raw score, and return the pattern with ``retrieval`` set.

        Set either ``sparsity`` or ``threshold``. The result depends on the arguments only, never on hidden
        state.

        Args:
            sparsity: wanted fraction of streaming heads in [0, 1]. ``round(L*K*(1-sparsity))`` heads stay
                retrieval heads, one half rounding up.
            threshold: a head is a retrieval head when its score is strictly greater, as in the paper.
            tie_break: ``stable`` ranks by (raw score, layer, head), so among equal scores the earlier head
                streams first. ``reference`` is the published repository's quantile of noisy, clipped scores;
                it supports a sparsity and the ``global`` balance only.
            seed: seed of the noise of ``reference``; without effect otherwise.
            balance: ``global``, ``per_layer`` (counts of any two layers differ by at most one) or
                ``per_rank`` (every tensor-parallel slice of a layer has equally many retrieval heads). See
                ``keep_strongest``.
            num_ranks: tensor-parallel ranks of ``per_rank``; must divide the number of KV heads.
        """
        if (sparsity is None) == (threshold is None):
            raise ValueError(
                f"expected either sparsity or threshold, got sparsity={sparsity} and threshold={threshold}"
            )
        if tie_break not in ("stable", "reference"):
            raise ValueError(f"expected tie_break 'stable' or 'reference', got {tie_break!r}")
        if num_ranks != 1 and balance != "per_rank":
            raise ValueError(f"expected balance='per_rank' with num_ranks={num_ranks}, got {balance!r}")
        _check_ranks(self.num_kv_heads, num_ranks)
        if balance != "global" and (threshold is not None or tie_break == "reference"):
            rule = "threshold" if threshold is not None else "tie_break='reference'"
            raise ValueError(f"expected balance='global' with {rule}, got {balance!r}")
        if threshold is not None and tie_break == "reference":
            raise ValueError("expected a sparsity with tie_break='reference', got a threshold")
        if threshold is not None:
            mask = keep_above(self.scores, threshold)
        else:
            assert sparsity is not None
            sparsity = check_sparsity(sparsity)
            if tie_break == "reference":
                mask = keep_by_noisy_quantile(self.scores, sparsity, seed)
            else:
                mask = keep_strongest(self.scores, sparsity, balance, num_ranks)
        return replace(self, retrieval=mask, promoted=None)

    def promote(self, counts: Sequence[int]) -> HeadPattern:
        """The binarised pattern with more retrieval heads: ``counts[l]`` of them in layer ``l``.

        Of the streaming heads of a layer those with the highest scores are promoted, of equal scores the
        later heads, as in ``binarise``.

        Raises:
            ValueError: the pattern is raw, or a layer has more retrieval heads already, or fewer heads.
        """
        least = [kept for kept, _ in self.head_counts]
        most = [self.num_kv_heads] * self.num_layers
        is_within = [low <= count <= high for low, count, high in zip(least, counts, most)]
        if len(counts) != self.num_layers or not all(is_within):
            raise ValueError(f"expected counts from {least} to {self.num_kv_heads} each, got {list(counts)}")
        mask = self.mask.copy()
        for row, scores, count in zip(mask, self.scores, counts):
            weakest_first = np.argsort(scores, kind="stable")
            streaming = weakest_first[~row[weakest_first]]
            row[streaming[self.num_kv_heads - count :]] = True
        added = mask & ~self.mask
        return replace(
            self, retrieval=mask, promoted=added if self.promoted is None else added | self.promoted
        )

    def shard(self, rank: int, num_ranks: int) -> HeadPattern:
        """The pattern of the contiguous slice of KV heads of tensor-parallel ``rank``."""
        _check_ranks(self.num_kv_heads, num_ranks)
        if not 0 <= rank < num_ranks:
            raise ValueError(f"expected rank in [0, {num_ranks}), got {rank}")
        size = self.num_kv_heads // num_ranks
        columns = slice(rank * size, (rank + 1) * size)
        mask = None if self.retrieval is None else self.retrieval[:, columns]
        promoted = None if self.promoted is None else self.promoted[:, columns]
        return replace(self, scores=self.scores[:, columns], retrieval=mask, promoted=promoted)

    def of_heads(self, heads: Sequence[Sequence[int]]) -> HeadPattern:
        """The pattern of some KV heads of each layer, equally many of each, in their order."""
        columns = np.array([list(each) for each in heads])

        def taken(values: NDArray[Any] | None) -> NDArray[Any] | None:
            return None if values is None else np.take_along_axis(values, columns, axis=1)

        scores = np.take_along_axis(self.scores, columns, axis=1)
        return replace(self, scores=scores, retrieval=taken(self.retrieval), promoted=taken(self.promoted))

    # --- Patterns from elsewhere ---

    @classmethod
    def load(cls, directory: str | Path) -> HeadPattern:
        """Read a pattern directory: ``full_attention_heads.tsv`` and ``config.json``.

        The table has one line per layer and one tab-separated score per KV head. Of the configuration
        ``sink_size`` and ``recent_size`` are needed, all other keys are carried along. The pattern is raw,
        unless the directory has the mask of a binarised one by ``save``. Raises ValueError for missing or
        malformed files.

        Source: the published patterns of mit-han-lab/duo-attention.
        """
        scores, retrieval, config = read_directory(Path(directory))
        return cls(
            scores=scores.astype(np.float32),
            sink=config["sink_size"],
            recent=config["recent_size"],
            source=str(directory),
            retrieval=None if retrieval is None else _mask("retrieval", retrieval, scores.shape),
            config=config,
        )

    def save(self, directory: str | Path) -> None:
        """Write the pattern in the published format, creating ``directory`` if need be.

        Scores have 19 significant digits, so a file with float32 values (all published ones) is reproduced
        byte for byte. A binarised pattern also leaves ``retrieval_heads.tsv``, a table of 0 and 1 which other
        readers of the format ignore; a raw one removes it.
        """
        config = {**self.config, "sink_size": self.sink, "recent_size": self.recent}
        write_directory(Path(directory), self.scores, self.retrieval, config)

    @classmethod
    def all_retrieval(
        cls, num_layers: int, num_kv_heads: int, *, sink: int = 0, recent: int = 1
    ) -> HeadPattern:
        """A binarised pattern that is plain full attention: every score 1, every head a retrieval head."""
        ones = np.ones((num_layers, num_kv_heads), dtype=np.float32)
        return cls(ones, sink, recent, "all retrieval", ones > 0)

    @classmethod
    def all_streaming(cls, num_layers: int, num_kv_heads: int, *, sink: int, recent: int) -> HeadPattern:
        """A binarised pattern of sink-and-recent attention: every score 0, every head a streaming head."""
        zeros = np.zeros((num_layers, num_kv_heads), dtype=np.float32)
        return cls(zeros, sink, recent, "all streaming", zeros > 0)

    @classmethod
    def random(
        cls, num_layers: int, num_kv_heads: int, seed: int, *, sink: int = 128, recent: int = 256
    ) -> HeadPattern:
        """A raw pattern of uniform scores in [0, 1), the same for the same seed; real ones must beat it."""
        scores = np.random.default_rng(seed).random((num_layers, num_kv_heads), dtype=np.float32)
        return cls(scores, sink, recent, f"random, seed {seed}")


def _count(name: str, value: int, minimum: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"expected {name} to be an integer >= {minimum}, got {value!r}") from None
    if number < minimum:
        raise ValueError(f"expected {name} to be an integer >= {minimum}, got {number}")
    return number


def _mask(name: str, values: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    given = np.array(values)
    if given.shape != shape:
        raise ValueError(f"expected {name} of shape {list(shape)} like scores, got {list(given.shape)}")
    mask = given.astype(np.bool_)
    if not np.array_equal(mask, given):
        raise ValueError(f"expected {name} to have True or False (1 or 0) only")
    mask.setflags(write=False)
    return mask


def _check_ranks(num_kv_heads: int, num_ranks: int) -> None:
    if num_ranks < 1 or num_kv_heads % num_ranks:
        raise ValueError(f"expected num_ranks to divide num_kv_heads={num_kv_heads}, got {num_ranks}")


NAME_KEY = "model_name"
FINGERPRINT_KEY = "model_fingerprint"
"""Keys of a pattern's config.json; ``hpu-duo identify`` writes both."""


def check_origin(pattern: HeadPattern, model_name: str, fingerprint: str | None) -> str | None:
    """Compare the model of a pattern with the one that it is used with.

    Args:
        model_name: for the message.
        fingerprint: of the model's files; None without weights.

    Returns:
        A note for the user when nothing could be compared, else None.

    Raises:
        ValueError: the pattern is of another model.
    """
    made_for = pattern.config.get(NAME_KEY)
    own = pattern.config.get(FINGERPRINT_KEY)
    if own is None:
        told = "" if made_for is None else f" but a name, {made_for!r}"
        return (
            f"the head pattern {pattern.source!r} has no {FINGERPRINT_KEY}{told}: only its shape "
            f"shows that it is for {model_name!r}"
        )
    if fingerprint is None:
        return (
            f"the head pattern {pattern.source!r} was made for {made_for!r}; whether {model_name!r} is that "
            "model cannot be determined without its weights"
        )
    if own != fingerprint:
        raise ValueError(
            f"expected a head pattern made for {model_name!r} ({FINGERPRINT_KEY} {fingerprint[:12]}), got "
            f"{pattern.source!r}, made for {made_for!r} ({str(own)[:12]}); to use it nevertheless, remove "
            f"{FINGERPRINT_KEY} from its config.json"
        )
    return None


@dataclass(frozen=True)
class HeadLayout:
    """Order of the heads of one layer: KV heads group by group, query heads with their KV head.

    Attributes:
        kv_order: K old head numbers; ``kv_order[new] = old``.
        num_heads: query heads H, a multiple of K.
    """

    kv_order: tuple[int, ...]
    num_heads: int

    def __post_init__(self) -> None:
        num_kv_heads = len(self.kv_order)
        if num_kv_heads == 0 or sorted(self.kv_order) != list(range(num_kv_heads)):
            raise ValueError(f"expected kv_order to be a permutation of 0..K-1, got {self.kv_order}")
        if self.num_heads < 1 or self.num_heads % num_kv_heads:
            raise ValueError(
                f"expected num_heads to be a multiple of {num_kv_heads} KV heads, got {self.num_heads}"
            )

    @classmethod
    def by_group(cls, group_of: ArrayLike, num_heads: int) -> HeadLayout:
        """Create the layout of a layer from the group of each KV head, int [K].

        The order within a group is preserved, so the layout of one group, or of ordered groups, is the
        identity.
        """
        numbers = np.asarray(group_of)
        if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
            raise ValueError(
                f"expected a group number of each KV head, int [num_kv_heads], "
                f"got {numbers.dtype} {list(numbers.shape)}"
            )
        return cls(tuple(np.argsort(numbers, kind="stable").tolist()), num_heads)

    @property
    def num_kv_heads(self) -> int:
        """KV heads K."""
        return len(self.kv_order)

    @property
    def group_size(self) -> int:
        """Query heads G that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_identity(self) -> bool:
        """Whether the order of heads is unchanged."""
        return self.kv_order == tuple(range(self.num_kv_heads))

    @cached_property
    def query_order(self) -> tuple[int, ...]:
        """H old query head numbers; ``query_order[new] = old``. Groups move as a whole."""
        size = self.group_size
        return tuple(kv_head * size + member for kv_head in self.kv_order for member in range(size))
