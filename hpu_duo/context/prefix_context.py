"""Contexts: texts with cached keys and values, for questions about them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpu_duo.context.record_file import open_context, save_context
from hpu_duo.context.saved import Document
from hpu_duo.generation import GenerativeModel
from hpu_duo.not_picklable import NotPicklable

if TYPE_CHECKING:
    from hpu_duo.request import PrefixHold


class PrefixContext(NotPicklable):
    """A text pinned in the prefix cache of a model until ``close``, or until it has been idle for long.

    With ``context_idle_seconds`` it is pinned again by its next question.

    Created by ``HPUDuoModel.prefill``, used by ``generate(questions, context=...)``. Full blocks of the text
    are cached, and the rings at their end; the few tokens after the last full block are computed with each
    question. Any thread may use it. It closes as a context manager, and when it is garbage-collected.

    Args:
        model: of the prefix cache.
        document: the text.
        cache_salt: see ``SamplingParams.cache_salt``.
        hold: of the pinned prefix.
    """

    def __init__(
        self, model: GenerativeModel, document: Document, cache_salt: str | None, hold: PrefixHold
    ) -> None:
        self._model, self._document, self._cache_salt = model, document, cache_salt
        self._lock = RLock()
        self._is_closed = False
        self._keep(hold)

    def _keep(self, hold: PrefixHold) -> None:
        self._hold = hold
        # Garbage is collected in the middle of anything, a step for instance.
        self._let_go = weakref.finalize(self, self._model.engine.contexts.close_later, hold)
        self._let_go.atexit = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the text."""
        return self._document.token_ids

    @property
    def text(self) -> str | None:
        """The text; None if token ids were given."""
        return self._document.text

    @property
    def num_held_tokens(self) -> int:
        """Leading tokens that questions do not compute: those in full blocks."""
        return len(self._hold.tokens)

    @property
    def cache_salt(self) -> str | None:
        """The salt of its questions."""
        return self._cache_salt

    @property
    def is_closed(self) -> bool:
        """Whether it has been closed."""
        return self._is_closed

    def prompt(self, question: str | Sequence[int]) -> list[int]:
        """Return the token ids of the text followed by a question, as in ``generate``.

        Token ids are appended as they are. A text is tokenised together with the document, so that tokens are
        those of one text, unless that changes cached tokens: if a cached token would extend into the
        question, and if the document was passed as token ids, the question is tokenised alone, without
        special tokens, and appended.

        Raises:
            ValueError: the question is empty, or a text and the model has no tokenizer.
        """
        return list(self._followed_by(question).token_ids)

    def _followed_by(self, more: Any) -> Document:
        return self._document.followed_by(more, self.num_held_tokens, self._model.tokenizer)

    def hold(self) -> PrefixHold:
        """Return the hold of the text.

        A step that fails leaves nothing in the cache, and ``context_idle_seconds`` without a question release
        the text. It is then loaded from a tier, or computed again.

        Raises:
            ValueError: the context is closed, or there is no room to compute it again.
        """
        with self._lock:
            if self._is_closed:
                raise ValueError("expected an open context, got a closed one")
            if self._hold.is_lost:
                contexts, lost = self._model.engine.contexts, self._hold
                hold = contexts.open(self.token_ids, self._cache_salt)
                self._let_go.detach()
                contexts.close(lost)
                self._keep(hold)
            self._hold.touch()
            return self._hold

    def fork(self, more: str | Sequence[int]) -> PrefixContext:
        """Extend the text; returns a longer context, which shares the blocks of this one.

        Args:
            more: text or token ids, see ``prompt``.

        Raises:
            ValueError: see ``prompt`` and ``HPUDuoModel.prefill``.
        """
        hold, document = self.hold(), self._followed_by(more)
        longer = self._model.engine.contexts.open(document.token_ids, self._cache_salt, hold)
        return PrefixContext(self._model, document, self._cache_salt, longer)

    def save(self, path: str | Path) -> None:
        """Write the text, its keys and values, and what they depend on, for ``HPUDuoModel.load_context``.

        The file has records as the disk tier has them. Requests are served meanwhile.

        Raises:
            ValueError: the context is closed, or is so meanwhile; the file cannot be written; or the model
                has several ranks, or records its steps.
        """
        self._model.engine.contexts.copies.check()
        save_context(Path(path), self._model, self._document, self._cache_salt, self.hold())

    def belongs_to(self, model: Any) -> bool:
        """Whether it is a model's."""
        return self._model is model

    def close(self) -> None:
        """Unpin the text; running questions are not affected. Closing twice is fine."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._let_go.detach()
                self._model.engine.contexts.close(self._hold)

    def __enter__(self) -> PrefixContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self.num_held_tokens} of them held"
        return f"PrefixContext({len(self.token_ids)} tokens, {state})"


class ContextModel(GenerativeModel):
    """A model with contexts: texts that are computed once, for many questions."""

    def prefill(
        self,
        document: str | Sequence[int] | np.ndarray | torch.Tensor,
        *,
        add_special_tokens: bool = True,
        cache_salt: str | None = None,
    ) -> PrefixContext:
        """Compute a text, and pin its keys and values for ``generate(questions, context=...)``.

        It is computed like any prompt, batched with other requests, and stays in the cache until the context
        is closed. Its blocks are not available to others: a request that would not fit beside it is rejected.

        Args:
            document: a text, or the token ids of one. Several documents are several calls.
            add_special_tokens: whether the tokenizer adds those that begin a prompt; not where a chat
                template has written them.
            cache_salt: see ``SamplingParams.cache_salt``; questions have the same.

        Raises:
            ValueError: the document is empty, too long or no text, the model was loaded with
                ``enable_prefix_caching=False``, or other contexts and unfinished requests leave too few
                blocks or snapshots.
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
        saved = open_context(Path(path), self)
        hold = self.engine.contexts.load(saved.document.token_ids, saved.cache_salt, saved)
        return PrefixContext(self, saved.document, saved.cache_salt, hold)
