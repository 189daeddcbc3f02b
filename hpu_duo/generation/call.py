"""One call of ``generate`` on an engine: requests, their host samplers, and the result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hpu_duo.generation.arguments import GenerationRequest
from hpu_duo.generation.processing import Hooks, ProcessedSample, WholeModel, processors_for
from hpu_duo.generation.questions import Questions
from hpu_duo.generation.results import assemble_rows, assemble_scores, feed
from hpu_duo.sampling import SamplingParams, derive_seed

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

    from hpu_duo.engine.engine import Engine


class GenerateCall:
    """The prompts of one call, with parameters of their own.

    Args:
        model: makes transformers' processors.
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
            # Processors keep a minimum of tokens by themselves.
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
    """Give each row a seed of its own, so that equal prompts get different samples."""
    given = params[0].seed
    # Where none is given, torch's generator says, as torch.manual_seed sets it.
    seed = int(torch.randint(2**62, ())) if given is None else given
    return [replace(one, seed=derive_seed(seed, number)) for number, one in enumerate(params)]


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"max_time: expected a number of seconds above 0, got {value!r}")
    return float(value)
