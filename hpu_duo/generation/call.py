"""``generate`` with the interface of a transformers model: prompts, requests, and the result."""

from __future__ import annotations

import logging
import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch
from transformers import GenerationConfig, MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hpu_duo.generation.arguments import GenerationRequest, read_generation
from hpu_duo.generation.processing import Hooks, ProcessedSample, WholeModel, processors_for
from hpu_duo.sampling import SamplingParams, derive_seed

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
    from transformers.generation import GenerateDecoderOnlyOutput
    from transformers.generation.streamers import BaseStreamer

    from hpu_duo.config.engine import EngineConfig
    from hpu_duo.engine.engine import Engine
    from hpu_duo.engine.outputs import Completion, RequestOutput
    from hpu_duo.request import PrefixHold


_log = logging.getLogger(__name__)

TokenLists: TypeAlias = Sequence[Sequence[int]]


def read_inputs(
    inputs: Any, attention_mask: torch.Tensor | None, asked: GenerationRequest
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the rows, and their prompts without left padding.

    Args:
        inputs: integer tensor ``[B, L]`` or lists of token ids.
        attention_mask: ``[B, L]``, zeros before ones; guessed from the pad id when left out.

    Raises:
        ValueError: inputs or mask are anything else, or there is no row.
    """
    if isinstance(inputs, torch.Tensor):
        if inputs.ndim != 2 or inputs.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                "expected an integer tensor [B, L] or a list of lists of token ids, "
                f"got {inputs.dtype} {list(inputs.shape)}"
            )
        rows = inputs.tolist()
        prompts = [
            row[len(row) - length :]
            for row, length in zip(rows, _prompt_lengths(inputs, attention_mask, asked))
        ]
    else:
        if attention_mask is not None:
            raise ValueError("attention_mask goes with a tensor; lists of token ids need no padding")
        rows = prompts = _as_lists(inputs)
    if not rows:
        raise ValueError("expected at least one prompt, got none")
    return rows, prompts


def _as_lists(inputs: Any) -> list[list[int]]:
    try:
        return [[operator.index(token) for token in row] for row in inputs]
    except TypeError as error:
        raise ValueError(
            f"expected an integer tensor [B, L] or a list of lists of token ids, got {reprlib.repr(inputs)}"
        ) from error


def _prompt_lengths(
    inputs: torch.Tensor, attention_mask: torch.Tensor | None, asked: GenerationRequest
) -> list[int]:
    if attention_mask is not None:
        if not isinstance(attention_mask, torch.Tensor):
            raise ValueError(f"attention_mask: expected a tensor, got {type(attention_mask).__name__}")
        if attention_mask.shape != inputs.shape:
            raise ValueError(
                f"expected attention_mask of shape {list(inputs.shape)}, got {list(attention_mask.shape)}"
            )
        mask = attention_mask.bool()
    elif asked.guesses_padding:
        mask = (inputs != asked.pad_token_id).cumsum(dim=1) > 0
    else:
        mask = torch.ones_like(inputs, dtype=torch.bool)
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("expected left padding: attention_mask of zeros then ones, got a zero after a one")
    lengths: list[int] = mask.sum(dim=1).tolist()
    return lengths


def feed(streamer: BaseStreamer, prompt: list[int]) -> Callable[[RequestOutput], None]:
    """Return a callback that passes tokens to a streamer, and the prompt before the first token.

    A prompt is accepted only once it has a token.
    """
    unread = [prompt]

    def on_output(output: RequestOutput) -> None:
        if unread:
            streamer.put(torch.tensor([unread.pop()]))
        if output.token_ids:
            streamer.put(torch.tensor(output.token_ids))

    return on_output


def assemble_rows(rows: list[list[int]], done: list[list[Completion]], pad_token_id: int) -> torch.Tensor:
    """Join rows with the new tokens of each of their samples, padded on the right: int64 ``[B, L]``."""
    filled = [row + sample.token_ids for row, samples in zip(rows, done) for sample in samples]
    new = max(len(sample.token_ids) for samples in done for sample in samples)
    width = max(len(row) for row in rows) + new
    return torch.tensor([row + [pad_token_id] * (width - len(row)) for row in filled])


def assemble_scores(samples: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Return the scores of each step, float32 ``[B, V]``; zeros for rows that have ended.

    Args:
        samples: for each row its scores, ``[1, V]`` each.
    """
    ended = torch.zeros_like(samples[0][0])
    num_steps = max(map(len, samples))
    return tuple(
        torch.cat([scores[step] if step < len(scores) else ended for scores in samples])
        for step in range(num_steps)
    )


class Context(Protocol):
    """A text in the engine's prefix cache."""

    @property
    def cache_salt(self) -> str | None:
        """The salt that its keys and values are cached under."""
        ...

    def belongs_to(self, model: Any) -> bool:
        """Whether it is a model's."""
        ...

    def prompt(self, question: str | Sequence[int]) -> list[int]:
        """Return the tokens of the text followed by a question."""
        ...

    def hold(self) -> PrefixHold:
        """Return its pinned prefix, recomputed if it was lost."""
        ...


@dataclass(frozen=True)
class Questions:
    """Prompts of a call of ``generate``.

    Attributes:
        shown: token ids that results begin with: the input rows.
        rows: those that processors and limits of length count, left padding included.
        prompts: those that are served.
        are_texts: whether inputs and results are texts.
        context: what the prompts begin with.
    """

    shown: list[list[int]]
    rows: list[list[int]]
    prompts: list[list[int]]
    are_texts: bool = False
    context: Context | None = None

    @classmethod
    def read(
        cls,
        inputs: Any,
        attention_mask: torch.Tensor | None,
        asked: GenerationRequest,
        context: Context | None,
    ) -> Questions:
        """Read the inputs of a call.

        Args:
            inputs: token ids, see ``read_inputs``; with a context also a text, or a list of texts.

        Raises:
            ValueError: see ``read_inputs``; or an argument cannot be combined with texts.
        """
        if context is None:
            rows, prompts = read_inputs(inputs, attention_mask, asked)
            return cls(rows, rows, prompts)
        texts = [inputs] if isinstance(inputs, str) else inputs
        if not isinstance(texts, list | tuple) or not any(isinstance(text, str) for text in texts):
            rows, prompts = read_inputs(inputs, attention_mask, asked)
            prompts = [context.prompt(prompt) for prompt in prompts]
            return cls(rows, prompts, prompts, context=context)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("expected questions that are all texts or all token ids, got some of each")
        if attention_mask is not None:
            raise ValueError("attention_mask goes with a tensor; texts need no padding")
        if asked.returns_dict:
            raise ValueError(
                "return_dict_in_generate goes with token ids; questions that are texts get texts"
            )
        prompts = [context.prompt(text) for text in texts]
        shown: list[list[int]] = [[] for _ in texts]
        return cls(shown, prompts, prompts, are_texts=True, context=context)


class GenerateCall:
    """The prompts of one call, with parameters of their own.

    Args:
        model: creates transformers' processors.
        questions: the prompts.

    Raises:
        ValueError: a value is out of range, a prompt fills ``max_length``, or a streamer has several
            sequences.
    """

    def __init__(
        self,
        model: WholeModel,
        asked: GenerationRequest,
        questions: Questions,
        hooks: Hooks,
        streamer: BaseStreamer | None = None,
    ) -> None:
        rows, prompts = questions.rows, questions.prompts
        self._asked, self._questions, self._streamer = asked, questions, streamer
        self._samples: list[list[ProcessedSample]] = []
        params = [asked.params_for(len(row)) for row in rows]
        if streamer is not None and len(prompts) * asked.num_samples != 1:
            raise ValueError(
                f"a streamer takes one sequence, got {len(prompts)} prompts with "
                f"{asked.num_samples} samples each"
            )
        if questions.context is not None:
            params = [replace(one, cache_salt=questions.context.cache_salt) for one in params]
        if asked.draws:
            params = _with_seeds(params)
        max_time = asked.config.max_time
        timed = [] if max_time is None else [MaxTimeCriteria(_seconds(max_time))]
        criteria = StoppingCriteriaList([*timed, *hooks.criteria])
        chooses = (
            asked.needs_processors
            or asked.returns_scores
            or asked.returns_logits
            or bool(hooks.processors)
            or hooks.allowed_tokens is not None
        )
        if chooses or criteria:
            for number, one in enumerate(params):
                self._samples.append(self._watched(model, number, one, hooks if chooses else None, criteria))
            # Processors implement a minimum of tokens themselves.
            params = [
                replace(one, host_sampler=each.__getitem__, min_tokens=0 if chooses else one.min_tokens)
                for one, each in zip(params, self._samples)
            ]
        self._params = params

    def _watched(
        self,
        model: WholeModel,
        number: int,
        params: SamplingParams,
        hooks: Hooks | None,
        criteria: StoppingCriteriaList,
    ) -> list[ProcessedSample]:
        """Return the host sampler of each sample of a prompt."""
        row, prompt_len = self._questions.rows[number], len(self._questions.prompts[number])
        samples = []
        for _ in range(params.n):
            processors = None
            if hooks is not None:
                processors = processors_for(model, self._asked, params, row, prompt_len, hooks, number)
            samples.append(ProcessedSample(row, processors, criteria, self._asked))
        return samples

    def run(self, engine: Engine) -> torch.Tensor | GenerateDecoderOnlyOutput | list[str]:
        """Generate, and return what transformers returns, or texts for texts.

        Raises:
            ValueError: a prompt cannot be served.
            Exception: what a processor or criterion of the caller raised.
        """
        asked = self._questions
        stream = None if self._streamer is None else feed(self._streamer, asked.shown[0])
        hold = None if asked.context is None else asked.context.hold()
        done = engine.generate(asked.prompts, self._params, stream, hold)
        if asked.are_texts:
            return [sample.text for samples in done for sample in samples]
        sequences = assemble_rows(asked.shown, done, self._asked.pad_token_id)
        if not self._asked.returns_dict:
            return sequences
        output: Any = GenerateDecoderOnlyOutput
        samples = [sample for each in self._samples for sample in each]
        return output(
            sequences=sequences,
            scores=assemble_scores([one.scores for one in samples]) if self._asked.returns_scores else None,
            logits=assemble_scores([one.logits for one in samples]) if self._asked.returns_logits else None,
        )


def _with_seeds(params: list[SamplingParams]) -> list[SamplingParams]:
    """Assign a seed to each row, so that equal prompts have different samples."""
    given = params[0].seed
    # Without a seed it is drawn from torch's generator, which torch.manual_seed sets.
    seed = int(torch.randint(2**62, ())) if given is None else given
    return [replace(one, seed=derive_seed(seed, number)) for number, one in enumerate(params)]


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"max_time: expected a number of seconds above 0, got {value!r}")
    return float(value)


_Model = TypeVar("_Model", bound="GenerativeModel")


class GenerativeModel:
    """A model that an engine serves, with the interface of transformers' models.

    Attributes:
        engine: for serving: ``add_request``, ``step``, ``abort``, ``generate`` with ``SamplingParams``.
        tokenizer: the checkpoint's, or None when it has none.
        generation_config: the checkpoint's defaults.
        engine_config: what the engine was loaded from.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase | None,
        generation_config: GenerationConfig,
        engine_config: EngineConfig,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.generation_config = generation_config
        self.engine_config = engine_config

    @property
    def config(self) -> PretrainedConfig:
        """The checkpoint's configuration, as transformers has it, also where ranks share the model."""
        config: PretrainedConfig = self.engine.hf_config
        return config

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and caches."""
        return self.engine.runner.model.model.dtype

    @property
    def device(self) -> torch.device:
        """The device of the model; prompts and results are on the host."""
        return self.engine.runner.device

    def eval(self: _Model) -> _Model:
        """Return the model, which is always in evaluation mode."""
        return self

    def compute_transition_scores(
        self, sequences: torch.Tensor, scores: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Return the score of each generated token, ``[B, steps]``, from what ``generate`` returned.

        See the method of transformers' models, which computes it. Rows that ended early are padded by scores
        of zero, or of equal probabilities if they are normalized.
        """
        whole: Any = WholeModel(self.config)
        found: torch.Tensor = whole.compute_transition_scores(sequences, scores, *args, **kwargs)
        return found

    def can_generate(self) -> bool:
        """Whether ``generate`` can be called: always."""
        return True

    def to(self: _Model, *wanted: Any, **named: Any) -> _Model:
        """Return the model if it is on this device and of this dtype; it cannot be moved or cast once loaded.

        Args:
            wanted: a device or a dtype, or both, as for ``torch.nn.Module.to``.

        Raises:
            ValueError: another device or dtype.
        """
        _check_place(self, wanted, named)
        return self

    def _speculate(
        self, asked: GenerationRequest, assistant: GenerativeModel | str | Path | None
    ) -> bool | int:
        """Return the most drafts of a step, after a check of the assistant.

        Raises:
            ValueError: another model than the assistant drafts here, or no layer of its own.
        """
        is_assisted = assistant is not None and assistant is not False
        if is_assisted:
            speculation = self.engine_config.scheduler.speculation
            own = None if speculation is None else speculation.model
            path = assistant.config.name_or_path if isinstance(assistant, GenerativeModel) else assistant
            is_own = (
                own is not None
                and isinstance(path, str | Path)
                and Path(path).resolve() == Path(own).resolve()
            )
            if not is_own:
                raise ValueError(
                    f"assistant_model: expected {'' if own is None else f'{own} or '}None, got {path!r:.80}; "
                    "the model that drafts is loaded with this one, by speculative_config={'method': "
                    "'draft_model', 'model': DIR} of from_pretrained"
                )
        if asked.drafts_itself:
            speculation = self.engine_config.scheduler.speculation
            method = None if speculation is None else speculation.method
            if method != "mtp":
                raise ValueError(
                    "use_mtp: expected a model loaded with from_pretrained(..., "
                    f"speculative_config={{'method': 'mtp'}}), got method {method!r}"
                )
        speculate = asked.speculate(is_assisted=is_assisted)
        if speculate is not True and self.engine.drafter is None:
            _log.warning(
                "prompt_lookup_num_tokens: tokens are decoded one by one, since the model was loaded without "
                "speculative_config"
            )
        return speculate

    def generate(
        self,
        inputs: torch.Tensor | TokenLists | str | Sequence[str] | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[Callable[..., torch.Tensor]] | None = None,
        stopping_criteria: Sequence[Callable[..., Any]] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
        synced_gpus: bool | None = None,
        assistant_model: GenerativeModel | str | Path | None = None,
        streamer: BaseStreamer | None = None,
        *,
        input_ids: torch.Tensor | TokenLists | None = None,
        attention_mask: torch.Tensor | None = None,
        context: Context | None = None,
        **generation_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput | list[str]:
        """Generate from token ids, with the arguments of transformers' ``generate``.

        ``docs/compatibility.md`` compares each of them. Arguments that need transformers' processors
        (``no_repeat_ngram_size``, ``bad_words_ids``, ``typical_p``, ...), returned scores, and functions of
        the caller run on the host, one row at a time, and slowly.

        Args:
            inputs: LongTensor ``[B, L]``, left-padded rows allowed, or a list of token-id lists.
            generation_config: takes precedence over the checkpoint's.
            logits_processor, stopping_criteria: called with one row, ``[1, L]``; what they raise ends the
                call. If a step fails, a processor is called again for the same token.
            prefix_allowed_tokens_fn: as for transformers.
            synced_gpus: False or None.
            assistant_model: the model that drafts here, or its directory: that of ``speculative_config``.
            streamer: called with the prompt once its first token is sampled, and then with each token; for
                one sequence only. Its ``end`` is called even if the call fails, so that no reader waits for
                more.
            input_ids: another name of ``inputs``, as in the output of tokenizers.
            attention_mask: ``[B, L]``, 0 for left padding. When left out, leading pad ids are padding if
                a pad id is known and no end-of-text token.
            context: of ``prefill``: a text that all inputs are appended to, token ids or texts. They see it
                and count it in their length, and results leave it out.
            generation_kwargs: fields of ``GenerationConfig``, and ``seed``, ``logit_bias``,
                ``presence_penalty``, ``frequency_penalty``, ``ignore_eos``, ``stop_token_ids``. Each row has
                a seed of its own, derived from ``seed`` or, without it, from torch's generator, so that draws
                are reproducible by ``torch.manual_seed``; they are not those of transformers.

        Returns:
            LongTensor ``[B * num_return_sequences, max(L) + new]`` on the host: the prompt, the new tokens,
            and the pad id to the right of rows that ended early. With ``return_dict_in_generate`` a
            ``GenerateDecoderOnlyOutput`` without cache, whose scores and logits are zero for such rows. For
            texts after a context the new texts, ``B * num_return_sequences`` of them.

        Raises:
            ValueError: an argument that is unknown, unsupported or out of range, or inputs that
                cannot be served. Nothing has been generated then.
        """
        given = {"synced_gpus": synced_gpus, **generation_kwargs}
        if streamer is not None and not all(
            callable(getattr(streamer, name, None)) for name in ("put", "end")
        ):
            raise ValueError(
                f"streamer: expected an object with the methods put and end, got {type(streamer).__name__}"
            )
        try:
            hooks = Hooks.read(logits_processor, stopping_criteria, prefix_allowed_tokens_fn)
            asked = read_generation(
                self.generation_config, generation_config, given, self.config.get_text_config().vocab_size
            )
            speculate = self._speculate(asked, assistant_model)
            if (inputs is None) is (input_ids is None):
                raise ValueError(
                    f"expected inputs or input_ids, got {'neither' if inputs is None else 'both'}"
                )
            if context is not None and not context.belongs_to(self):
                raise ValueError("expected a context of this model, got one of another model")
            given_inputs = input_ids if inputs is None else inputs
            questions = Questions.read(given_inputs, attention_mask, asked, context)
            whole = WholeModel(self.config)
            asked = replace(asked, ours={**asked.ours, "speculate": speculate})
            return GenerateCall(whole, asked, questions, hooks, streamer).run(self.engine)
        finally:
            if streamer is not None:
                streamer.end()


def _check_place(model: GenerativeModel, wanted: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of ``to`` with another device or dtype than the model's."""
    places = [*wanted, *(named[name] for name in ("device", "dtype") if name in named)]
    for place in places:
        if isinstance(place, torch.dtype):
            is_there = place == model.dtype
        else:
            is_there = _is_device(place, model.device)
        if not is_there:
            raise ValueError(
                f"expected to({str(model.device)!r}) or to({model.dtype}), where the model is already, "
                f"got {place!r}; choose device and dtype in from_pretrained"
            )


def _is_device(place: Any, device: torch.device) -> bool:
    try:
        asked = torch.device(place)
    except (RuntimeError, TypeError):
        return place is None
    return asked.type == device.type and asked.index in (None, device.index or 0)
