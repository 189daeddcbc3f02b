"""A served model that keeps texts for questions behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpu_duo.context.prefix_context import PrefixContext
from hpu_duo.context.saved import SavedContext
from hpu_duo.context.text import Document
from hpu_duo.generation import GenerativeModel

if TYPE_CHECKING:
    pass


class ContextModel(GenerativeModel):
    """A model that reads a text once and is asked many times."""

    def prefill(
        self,
        document: str | Sequence[int] | np.ndarray | torch.Tensor,
        *,
        add_special_tokens: bool = True,
        cache_salt: str | None = None,
    ) -> PrefixContext:
        """Read a text, and keep its keys and values for questions: ``generate(questions, context=...)``.

        It is served like any prompt, beside other requests, and stays in the cache until the context is
        closed. Its blocks are then missing for others: a request that would not fit beside it is refused.

        Args:
            document: a text, or the token ids of one. Several documents are several calls.
            add_special_tokens: whether the tokenizer adds those that begin a prompt; not where a chat
                template has written them.
            cache_salt: see ``SamplingParams.cache_salt``; questions have the same.

        Raises:
            ValueError: the document is empty, too long or no text, the model was loaded with
                ``enable_prefix_caching=False``, or blocks or snapshots are too few beside other contexts and
                what unfinished requests may need.
        """
        read = Document.read(document, self.tokenizer, add_special_tokens)
        return PrefixContext(self, read, cache_salt, self.engine.contexts.open(read.token_ids, cache_salt))

    def load_context(self, path: str | Path) -> PrefixContext:
        """Load a context that ``PrefixContext.save`` has written, instead of computing it.

        Steps wait until it is there. No code of the file runs.

        Raises:
            ValueError: the file cannot be read, is damaged or no context, or is of a model whose weights,
                heads, dtype, block size, softmax or rotary frequencies differ, which the message names; there
                is no room, see ``prefill``; or the model has several ranks, or records its steps.
        """
        self.engine.contexts.copies.check()
        saved = SavedContext.open(Path(path), self)
        hold = self.engine.contexts.load(saved.document.token_ids, saved.cache_salt, saved)
        return PrefixContext(self, saved.document, saved.cache_salt, hold)
