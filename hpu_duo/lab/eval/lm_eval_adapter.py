"""The model ``hpu-duo`` of lm-evaluation-harness, scored through the decode path.

Harness wrappers usually score a continuation inside the prefill of context and continuation, where every
query sees the keys of its own pass: a cache that has dropped the needle is never read, and every head pattern
looks lossless. Here the context is prefilled but for its last token, and the rest is decoded from the cache.

Releases of the harness that look for the entry point group ``lm_eval.models`` find the name by themselves.
For others, ``hpu-duo eval lm-eval`` is the harness's own command line with the name known, and importing this
module is enough for ``lm_eval.simple_evaluate(model="hpu-duo", ...)``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import MODEL_REGISTRY, register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.config.overrides import LoadOverrides
from hpu_duo.lab.eval.kv_bytes import KVByTask, KVBytes
from hpu_duo.lab.eval.model_under_test import Subject, encode_known
from hpu_duo.llm import HPUDuoModel
from hpu_duo.sampling import SamplingParams

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

NAME = "hpu-duo"
_LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_HARNESS_RUN: ContextVar[list[KVByTask] | None] = ContextVar("_HARNESS_RUN", default=None)
"""KV bytes of the models that the harness makes during ``run_harness``."""


class HPUDuoLM(TemplateLM):
    """A checkpoint with a head pattern, as a model of the harness.

    Args:
        pretrained: directory of a checkpoint; None is the built-in model, which also brings its pattern when
            its heads are to be cut.
        pattern, sparsity, threshold, sink, recent: which heads stream; see ``HPUDuoModel.from_pretrained``.
        max_length: most tokens of context and continuation; None is what the model holds.
        max_gen_toks: most tokens of an answer, for tasks that set no limit.
        batch_size: requests that run at the same time; "auto" is 8.
        max_batch_size: accepted because the harness passes it; without effect.
        add_bos_token: put the tokenizer's beginning-of-text token in front of contexts.
        truncate: cut contexts that are too long at their beginning, as other wrappers do, instead of refusing
            them.
        device: for the harness also "cuda:0" and the like.
        options: any other argument of ``HPUDuoModel.from_pretrained``.

    Raises:
        ValueError: what ``HPUDuoModel.from_pretrained`` refuses, or a model without a tokenizer.
    """

    def __init__(
        self,
        pretrained: str | Path | None = None,
        *,
        pattern: str | Path | None = None,
        sparsity: float | None = None,
        threshold: float | None = None,
        sink: int | None = None,
        recent: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        add_bos_token: bool = True,
        truncate: bool = False,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        unknown = sorted(options.keys() - LoadOverrides.__annotations__.keys())
        if unknown:
            raise ValueError(
                f"expected arguments of HPUDuoLM or HPUDuoModel.from_pretrained, got {', '.join(unknown)}"
            )
        is_cut = sparsity is not None or threshold is not None
        if pretrained is None and pattern is None and is_cut:
            pattern = PATTERN_DIR
        options.setdefault("enable_prefix_caching", False)  # scores do not depend on what was asked before
        self.subject = Subject(
            HPUDuoModel.from_pretrained(
                MODEL_DIR if pretrained is None else pretrained,
                pattern=pattern,
                sparsity=sparsity,
                threshold=threshold,
                sink=sink,
                recent=recent,
                device=device or "auto",
                max_model_len=max_length,
                max_num_seqs=_num_rows(batch_size),
                **options,
            )
        )
        self.kv = KVByTask()
        run = _HARNESS_RUN.get()
        if run is not None:
            run.append(self.kv)
        self._tasks: list[str | None] = []
        self.tokenizer = self.subject.tokenizer
        self._max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._truncate = truncate

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without context: the beginning token, or else the one that ends a text."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """Most tokens of context and continuation."""
        return self.subject.max_len

    @property
    def max_gen_toks(self) -> int:
        """Most tokens of an answer, for tasks that set no limit."""
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for the harness's caches of prompts."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; see ``encode_known`` for what is refused.

        Args:
            add_special_tokens: None adds a beginning token that is wanted and not in the text yet.
        """
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = self._add_bos_token and not (bos and string.startswith(bos))
        return encode_known(self.tokenizer, string, is_start=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as one text."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's template, for the harness's caches."""
        return (self.tokenizer.chat_template or "") if chat_template else ""

    def get_model_info(self) -> dict[str, Any]:
        """Tokens and KV bytes of each task's requests with their answers, for the harness's report."""
        return {"kv_cache": self.kv.rows()}

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is what greedy decoding gives."""
        self._tasks = [request.task_name for request in requests]
        try:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        finally:
            self._tasks = []

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, each token given as much text before it as the model holds."""
        result = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                # One less: the window's own tokens and the one before it.
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            scored, kv = self._score(pairs)
            self.kv.add([request.task_name] * len(kv), kv)
            result.append(sum(logprob for logprob, _ in scored))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), result[-1])
        return result

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, decoded until a stop string, the end of the text or the length limit."""
        asked = [request.args for request in requests]
        params = [self._params(dict(kwargs)) for _, kwargs in asked]
        prompts = [
            self._fit(self.tok_encode(context), one.max_tokens or 1)
            for (context, _), one in zip(asked, params, strict=True)
        ]
        with _accepted():
            done = self.subject.model.engine.generate(prompts, params)
        answers, kv = self.subject.completed(prompts, done)
        self.kv.add([request.task_name for request in requests], kv)
        for (context, kwargs), answer in zip(asked, answers, strict=True):
            self.cache_hook.add_partial("generate_until", (context, kwargs), answer)
        return answers

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Scores of tokenised continuations, in the order of the requests."""
        result, kv = self._score([(context, tokens) for _, context, tokens in requests])
        self.kv.add(self._tasks or [None] * len(kv), kv)
        for (texts, _, _), score in zip(requests, result, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return result

    def _score(
        self, pairs: Sequence[tuple[list[int], list[int]]]
    ) -> tuple[list[tuple[float, bool]], list[KVBytes]]:
        """Log-probability and greedy flag of each continuation, and what is kept of it with its context.

        Continuations of one context share its prefill.
        """
        fitted = [(self._fit(context, len(tokens)), tokens) for context, tokens in pairs]
        order = sorted(range(len(fitted)), key=lambda at: (-len(fitted[at][0]), fitted[at][0], at))
        groups = [list(group) for _, group in groupby(order, key=lambda at: fitted[at][0])]
        result: list[tuple[float, bool]] = [(0.0, True)] * len(fitted)
        with _accepted():
            scored, kv = self.subject.score(
                [fitted[group[0]][0] for group in groups],
                [[fitted[at][1] for at in group] for group in groups],
            )
        kept = [KVBytes(0, 0, 0)] * len(fitted)
        for group, scores, sizes in zip(groups, scored, kv, strict=True):
            for at, score, size in zip(group, scores, sizes, strict=True):
                result[at], kept[at] = (score.logprob, score.is_greedy), size
        return result, kept

    def _fit(self, context: Sequence[int], num_after: int) -> list[int]:
        most = self.max_length - num_after
        if len(context) <= most:
            return list(context)
        if not self._truncate or most < 1:
            raise ValueError(
                f"expected a context of at most {most} tokens before {num_after} others, which the model can "
                f"hold, got {len(context)}; truncate=True cuts its beginning"
            )
        return list(context[-most:])

    def _params(self, kwargs: dict[str, Any]) -> SamplingParams:
        until = kwargs.pop("until", None) or []
        lengths = [kwargs.pop(name, None) for name in _LENGTH_NAMES]
        most = next((int(length) for length in lengths if length is not None), self._max_gen_toks)
        is_drawn = kwargs.pop("do_sample", None)
        sampling = {name: kwargs.pop(name) for name in _SAMPLING_NAMES if kwargs.get(name) is not None}
        if is_drawn is False or "temperature" not in sampling:
            sampling["temperature"] = 1.0 if is_drawn and "temperature" not in sampling else 0.0
        if kwargs:
            raise ValueError(f"expected generation arguments of the harness, got also {', '.join(kwargs)}")
        stop = [until] if isinstance(until, str) else [text for text in until if text]
        return SamplingParams(max_tokens=most, stop=stop, decoded_prompt_tokens=1, **sampling)


def register() -> None:
    """Make the name known to the harness, if its entry points have not done so."""
    # The harness adds its own models when it finds no name at all, so they have to be there first.
    import lm_eval.models  # noqa: F401

    if NAME not in MODEL_REGISTRY:
        register_model(NAME)(HPUDuoLM)


def run_harness(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Run the harness's own command line, with ``--model hpu-duo`` known.

    The harness's default device is the first GPU; here it is the best device that the machine has.

    Returns:
        KV bytes of each task, as in ``KVByTask.rows``; none if the harness made no such model.
    """
    from lm_eval.__main__ import cli_evaluate

    device = ["--device", "auto"] if NAME in arguments and "--device" not in arguments else []
    given, sys.argv = sys.argv, ["lm-eval", *arguments, *device]
    made: list[KVByTask] = []
    token = _HARNESS_RUN.set(made)
    try:
        cli_evaluate()
    finally:
        sys.argv = given
        _HARNESS_RUN.reset(token)
    return [row for one in made for row in one.rows()]


@contextmanager
def _accepted() -> Iterator[None]:
    """Keep a ``ValueError`` of accepted work, which is a bug, from looking like a refused argument."""
    try:
        yield
    except ValueError as error:
        raise RuntimeError("a run failed whose input had been accepted") from error


def _num_rows(batch_size: int | str) -> int:
    text = str(batch_size).partition(":")[0]
    if text == "auto":
        return 8
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected batch_size to be 1 or more, or auto, got {batch_size!r}")
    return int(text)


register()
