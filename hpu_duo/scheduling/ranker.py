"""Models that rank prompts by the length of their outputs, and their files."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from hpu_duo.modeling.config_checks import NO_REMOTE_CODE, refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Prompt = np.ndarray | Sequence[int]


class Ranker(nn.Module, ABC):
    """Scores prompts: the lower, the shorter the output that is expected. Only the order means something.

    Attributes:
        kind: name in files.
        vocab_size: tokens of prompts have to be below it; None = any will do.
    """

    kind: ClassVar[str]
    vocab_size: int | None = None

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Constructor arguments, as JSON values."""

    @abstractmethod
    def forward(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Return the scores of prompts, float32 [number of prompts], with gradients."""

    @torch.inference_mode()
    def score(self, prompts: Sequence[Prompt]) -> list[float]:
        """Return the scores of prompts, of at least one token each."""
        return self(prompts).tolist() if prompts else []


_FIRST, _ANY, _PAIR, _LENGTH = range(4)
"""Kinds of features, which are hashed apart."""


class LinearRanker(Ranker):
    """Adds up a weight for each feature of a prompt, in a fraction of a millisecond.

    Features are the tokens of the beginning and of the end, pairs of neighbours among them, the first tokens,
    and the length on a logarithmic scale. Each is hashed to one of ``num_features`` weights, so that no
    vocabulary is needed.

    Args:
        num_features: weights, a power of two.
        max_tokens: tokens that are looked at, half at the beginning and half at the end.

    Raises:
        ValueError: an argument is out of range.
    """

    kind: ClassVar[str] = "linear"

    def __init__(self, num_features: int = 1 << 16, max_tokens: int = 512) -> None:
        super().__init__()
        if num_features < 2 or num_features & (num_features - 1) or max_tokens < 2:
            raise ValueError(
                "expected num_features to be a power of two and max_tokens 2 or more, got "
                f"{num_features} and {max_tokens}"
            )
        self._num_features, self._max_tokens = num_features, max_tokens
        self.weights = nn.EmbeddingBag(num_features, 1, mode="sum", include_last_offset=True)
        self.of_length = nn.Parameter(torch.zeros(()))
        nn.init.zeros_(self.weights.weight)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments to make it again."""
        return {"num_features": self._num_features, "max_tokens": self._max_tokens}

    def forward(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Return the scores of prompts."""
        features = [self._features(np.asarray(prompt, dtype=np.int64)) for prompt in prompts]
        offsets = torch.tensor([0, *np.cumsum([len(each) for each in features])])
        flat = torch.from_numpy(np.concatenate(features))
        # So that a long prompt counts no more than a short one.
        shares = torch.from_numpy(
            np.concatenate([np.full(len(e), len(e) ** -0.5, np.float32) for e in features])
        )
        lengths = torch.tensor([float(np.log(len(prompt))) for prompt in prompts])
        summed = self.weights(flat, offsets, per_sample_weights=shares).squeeze(1)
        return summed + self.of_length * lengths

    def _features(self, tokens: np.ndarray) -> np.ndarray:
        half = self._max_tokens // 2
        seen = tokens if len(tokens) <= self._max_tokens else np.concatenate([tokens[:half], tokens[-half:]])
        return np.concatenate(
            [
                self._hashed(_ANY, np.unique(seen)),
                self._hashed(_PAIR, np.unique(seen[:-1] * 0x10001 + seen[1:])),
                self._hashed(_FIRST, seen[:4] * 8 + np.arange(min(4, len(seen)))),
                self._hashed(_LENGTH, np.array([int(2 * np.log2(len(tokens)))])),
            ]
        )

    def _hashed(self, kind: int, values: np.ndarray) -> np.ndarray:
        """Spread values over the weights: the upper bits of a product with an odd constant (Knuth)."""
        mixed = (values.astype(np.uint64) * np.uint64(4) + np.uint64(kind)) * np.uint64(0x9E3779B97F4A7C15)
        return ((mixed >> np.uint64(32)) % np.uint64(self._num_features)).astype(np.int64)


_PAD = 0


class EncoderRanker(Ranker):
    """The mean of a model's last hidden states over a prompt, projected to one number.

    Any model of ``AutoModel`` is possible: an encoder such as BERT, or a decoder such as OPT. Its vocabulary
    has to be that of the prompts.

    Args:
        config: the configuration, with its ``model_type``.
        max_tokens: first tokens of a prompt that are looked at; at most what the model has positions for.

    Raises:
        ValueError: the configuration is not one of a model, or has too few positions for a token.

    Source: Fu et al. 2024 (arXiv:2408.15792), where it is OPT-125M with 2,048 tokens.
    """

    kind: ClassVar[str] = "encoder"

    def __init__(self, config: dict[str, Any], max_tokens: int = 2048) -> None:
        # Slow to import, and no other ranker needs it.
        from transformers import AutoConfig, AutoModel

        super().__init__()
        if "model_type" not in config:
            raise ValueError(f"expected a configuration with 'model_type', got {sorted(config)[:5]}")
        known = {name: value for name, value in config.items() if name not in ("model_type", "auto_map")}
        made = AutoConfig.for_model(config["model_type"], **known)
        self._config = made.to_diff_dict() | {"model_type": config["model_type"]}
        self.model: PreTrainedModel = AutoModel.from_config(
            made, trust_remote_code=False, attn_implementation="eager"
        )
        positions = getattr(made, "max_position_embeddings", None)
        if positions is not None:
            unused = _num_unused_positions(self.model)
            if positions <= unused:
                raise ValueError(f"expected max_position_embeddings above {unused}, got {positions}")
            max_tokens = min(max_tokens, positions - unused)
        self._max_tokens = max_tokens
        self.head = nn.Linear(made.hidden_size, 1)
        self.vocab_size = made.vocab_size

    @classmethod
    def of(cls, directory: Path, max_tokens: int = 2048) -> EncoderRanker:
        """Load it from a directory with config.json, and with weights if there are any.

        Raises:
            ValueError: the directory has no configuration of a model.
        """
        from transformers import AutoConfig, AutoModel

        try:
            config = AutoConfig.from_pretrained(directory, **NO_REMOTE_CODE)
        except (OSError, ValueError, KeyError) as error:
            raise refusal(f"expected a configuration of a model in {directory}", error) from error
        ranker = cls(config.to_dict(), max_tokens)
        if any(directory.glob("*.safetensors")):
            loaded = AutoModel.from_pretrained(directory, attn_implementation="eager", **NO_REMOTE_CODE)
            ranker.model = loaded.float()
        return ranker

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments to make it again."""
        return {"config": self._config, "max_tokens": self._max_tokens}

    def forward(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Return the scores of prompts.

        Raises:
            ValueError: a token is not in the vocabulary.
        """
        cut = [np.asarray(prompt[: self._max_tokens], dtype=np.int64) for prompt in prompts]
        largest = max(int(prompt.max()) for prompt in cut)
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise ValueError(
                f"expected tokens below vocab_size={self.vocab_size} of the ranker, got {largest}"
            )
        longest = max(map(len, cut))
        token_ids = torch.full((len(cut), longest), _PAD)
        mask = torch.zeros((len(cut), longest), dtype=torch.int64)
        for row, prompt in enumerate(cut):
            token_ids[row, : len(prompt)] = torch.from_numpy(prompt)
            mask[row, : len(prompt)] = 1
        hidden = self.model(input_ids=token_ids, attention_mask=mask).last_hidden_state
        mean = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return self.head(mean).squeeze(1)


def _num_unused_positions(model: nn.Module) -> int:
    """Return the position of the first token: for RoBERTa-like models one after that of padding."""
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and name.endswith("position_embeddings")
        if is_table and module.padding_idx is not None:
            return int(module.padding_idx) + 1
    return 0


_KINDS: dict[str, type[Ranker]] = {one.kind: one for one in (LinearRanker, EncoderRanker)}
_SETTINGS, _WEIGHTS = "ranker.json", "model.safetensors"


def save_ranker(ranker: Ranker, directory: Path) -> None:
    """Save a ranker to a directory, which is created if needed.

    Raises:
        ValueError: the files cannot be written, or would replace others.
    """
    check_free(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: each.contiguous() for name, each in ranker.state_dict().items()}, directory / _WEIGHTS
        )
        settings = json.dumps({"kind": ranker.kind, **ranker.settings}, indent=1)
        (directory / _SETTINGS).write_text(settings, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write a ranker to {directory}: {error}") from error


def check_free(directory: Path) -> None:
    """Raise ValueError for a directory that has a model.

    Raises:
        ValueError: it has one.
    """
    if any((directory / name).exists() for name in (_SETTINGS, _WEIGHTS)):
        raise ValueError(f"expected a directory without a model, and {directory} has one")


def load_ranker(directory: Path) -> Ranker:
    """Read a ranker from a directory.

    Raises:
        ValueError: it has none, or one that cannot be read.
    """
    try:
        settings = json.loads((directory / _SETTINGS).read_text(encoding="utf-8"))
        kind = _KINDS[settings.pop("kind")]
        ranker = kind(**settings)
        ranker.load_state_dict(load_file(directory / _WEIGHTS))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"expected a ranker of hpu-duo train-ranker in {directory}, got: {type(error).__name__}: {error}"
        ) from error
    return ranker.eval()
