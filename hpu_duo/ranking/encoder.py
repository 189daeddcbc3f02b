"""A transformers model with one number behind it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from hpu_duo.ranking.ranker import Prompt, Ranker
from hpu_duo.remote_code import NO_REMOTE_CODE, refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PAD = 0


class EncoderRanker(Ranker):
    """Averages the last hidden states of a model over a prompt, and takes one number of the mean.

    Any model that ``AutoModel`` makes from a configuration will do: an encoder such as BERT, or a decoder
    such as OPT. Its vocabulary has to be that of the prompts.

    Args:
        config: the configuration, with its ``model_type``.
        max_tokens: first tokens of a prompt that are looked at; at most what the model has positions for.

    Raises:
        ValueError: the configuration is not one of a model, or its positions hold no token.

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
        """Make it from a directory with config.json, and with the weights there if there are any.

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
    """Return the position of the first token: in the manner of RoBERTa that is one behind padding's."""
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and name.endswith("position_embeddings")
        if is_table and module.padding_idx is not None:
            return int(module.padding_idx) + 1
    return 0
