"""A served model with the interface of a transformers model: ``generate`` and the attributes scripts use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import GenerationConfig

from hpu_duo.generation.arguments import read_generation
from hpu_duo.generation.call import Context, GenerateCall, Questions, TokenLists
from hpu_duo.generation.processing import Hooks, WholeModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
    from transformers.generation import GenerateDecoderOnlyOutput
    from transformers.generation.streamers import BaseStreamer

    from hpu_duo.config.engine import EngineConfig
    from hpu_duo.engine.engine import Engine

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

        See the method of transformers' models, which computes it. Behind their end, rows that ended early
        have scores of zero, or of equal probabilities if they are normalized.
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

    def generate(
        self,
        inputs: torch.Tensor | TokenLists | str | Sequence[str] | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[Callable[..., torch.Tensor]] | None = None,
        stopping_criteria: Sequence[Callable[..., Any]] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
        synced_gpus: bool | None = None,
        assistant_model: None = None,
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
                call. If a step fails, a processor is asked again for the token that it gave.
            prefix_allowed_tokens_fn: as for transformers.
            synced_gpus, assistant_model: False or None.
            streamer: gets the prompt once its first token is there, and then each token; for one sequence
                only. Its ``end`` is called even if the call fails, so that no reader waits for more.
            input_ids: another name of ``inputs``, as in the output of tokenizers.
            attention_mask: ``[B, L]``, 0 for left padding. When left out, leading pad ids are padding if
                a pad id is known and no end-of-text token.
            context: of ``prefill``: a text that all inputs go on behind, token ids or texts. They see it and
                count it in their length, and results leave it out.
            generation_kwargs: fields of ``GenerationConfig``, and ``seed``, ``logit_bias``,
                ``presence_penalty``, ``frequency_penalty``, ``ignore_eos``, ``stop_token_ids``. Rows draw
                with seeds of their own, made from ``seed`` or, without it, from torch's generator, so that
                ``torch.manual_seed`` makes them reproducible; the draws are not those of transformers.

        Returns:
            LongTensor ``[B * num_return_sequences, max(L) + new]`` on the host: the prompt as given, the new
            tokens, and the pad id to the right of rows that ended early. With ``return_dict_in_generate`` a
            ``GenerateDecoderOnlyOutput`` without cache, whose scores and logits are zero for such rows.
            For texts behind a context the new texts, ``B * num_return_sequences`` of them.

        Raises:
            ValueError: an argument that is unknown, unsupported or out of range, or inputs that
                cannot be served. Nothing has been generated then.
        """
        given = {"synced_gpus": synced_gpus, "assistant_model": assistant_model, **generation_kwargs}
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
            if (inputs is None) is (input_ids is None):
                raise ValueError(
                    f"expected inputs or input_ids, got {'neither' if inputs is None else 'both'}"
                )
            if context is not None and not context.belongs_to(self):
                raise ValueError("expected a context of this model, got one of another model")
            given_inputs = input_ids if inputs is None else inputs
            questions = Questions.read(given_inputs, attention_mask, asked, context)
            whole = WholeModel(self.config)
            return GenerateCall(whole, asked, questions, hooks, streamer).run(self.engine)
        finally:
            if streamer is not None:
                streamer.end()


def _check_place(model: GenerativeModel, wanted: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Refuse the arguments of ``to`` that ask for another device or dtype than the model's."""
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
