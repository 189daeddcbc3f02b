"""Outputs of requests, and queues that route them to the calls that share an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from threading import Lock, get_ident
from typing import TYPE_CHECKING

from hpu_duo.request import FinishReason

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from hpu_duo.engine.step_plan import StepPlan
    from hpu_duo.sampling import TokenLogprobs


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at one output position, under the model's own distribution.

    Attributes:
        token_id, logprob, rank: of the sampled token; rank 1 is the likeliest.
        top: token id to log-probability of the likeliest tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(frozen=True)
class RequestOutput:
    """A new token of one request, or its end; a step may return several.

    Attributes:
        request_id: as given to ``add_request``; samples of one prompt share it.
        sample_index: index of the sample among ``n``.
        token_ids: new tokens; at most one.
        text: new text, empty without a tokenizer.
        logprobs: one entry per token if requested.
        finish_reason: set in the last output of a sample.
        stop_reason: the stop string or stop token that ended it.
        error: the error that ended it, with finish reason ``error``.
        admitted_at: when its prompt was first admitted, by ``time.perf_counter``; set with the first token of
            each sample, otherwise None.
        num_cached_tokens: prompt tokens that hit the prefix cache.
        num_predicted: tokens of the predicted output that steps have accepted and rejected so far.
    """

    request_id: str
    sample_index: int
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None
    admitted_at: float | None = field(default=None, compare=False)
    num_cached_tokens: int = 0
    num_predicted: tuple[int, int] = (0, 0)

    @property
    def is_finished(self) -> bool:
        """Whether this is the sample's last output."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class ContinuationScore:
    """Log-probabilities of one given continuation of a prompt.

    Attributes:
        logprobs: natural logarithm of the probability of each token, given the prompt and the tokens before.
        is_likeliest: for each token, whether greedy decoding would have chosen it there.
    """

    logprobs: tuple[float, ...]
    is_likeliest: tuple[bool, ...]

    @property
    def logprob(self) -> float:
        """Log-probability of the whole continuation."""
        return math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding of the prompt would return the continuation."""
        return all(self.is_likeliest)


@dataclass
class Completion:
    """One finished sample, as ``Engine.generate`` returns it."""

    request_id: str
    sample_index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        """Append the output of a step."""
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.num_cached_tokens = output.num_cached_tokens


class Completions:
    """Outputs of the requests of one call so far.

    Attributes:
        mail: outputs that ``take_mail`` has not returned yet. Steps of any thread append to it.

    Args:
        on_output: called with each of their outputs.
        raises: whether ``add`` raises the error that ended one of them.
    """

    def __init__(self, on_output: Callable[[RequestOutput], None] | None, *, raises: bool = True) -> None:
        self.mail: list[RequestOutput] = []
        self._on_output, self._raises = on_output, raises
        self._samples: dict[str, dict[int, Completion]] = {}

    def expect(self, request_id: str) -> None:
        """Append a request."""
        self._samples[request_id] = {}

    def take_mail(self) -> list[RequestOutput]:
        """Return and clear ``mail``."""
        mail, self.mail = self.mail, []
        return mail

    def add(self, outputs: Iterable[RequestOutput]) -> None:
        """Append outputs to the samples, and call ``on_output``.

        Raises:
            Exception: the error that ended one of them.
        """
        for output in outputs:
            samples = self._samples[output.request_id]
            if output.sample_index not in samples:
                samples[output.sample_index] = Completion(output.request_id, output.sample_index)
            samples[output.sample_index].add(output)
            if self._on_output is not None:
                self._on_output(output)
            if output.error is not None and self._raises:
                raise output.error

    def in_order(self) -> list[list[Completion]]:
        """The samples of each request."""
        return [[samples[index] for index in sorted(samples)] for samples in self._samples.values()]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._samples

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[str]:
        return iter(self._samples)


def logprobs_of(
    plan: StepPlan, token_ids: npt.NDArray[np.int32], logprobs: TokenLogprobs
) -> dict[int, TokenLogprob]:
    """Log-probabilities of a step's tokens, by sample of the plan, for requests that have them enabled."""
    sampled, rank, top_ids, top = (x.tolist() for x in logprobs)
    requests = [row.request for row in plan.sampled_rows for _ in range(row.num_samples)]
    found = {}
    for sample, request in enumerate(requests):
        width = request.params.logprobs
        if width is not None:
            best = dict(zip(top_ids[sample][:width], top[sample][:width]))
            token = int(token_ids[sample])
            found[sample] = TokenLogprob(token, sampled[sample], rank[sample], best)
    return found


class OutputQueue:
    """Queues each output for the ``generate`` call that it belongs to, or for the next ``step``."""

    def __init__(self) -> None:
        self._calls: dict[str, Completions] = {}
        self._unreported: list[RequestOutput] = []

    def expect(self, request_id: str, call: Completions) -> None:
        """Route the outputs of a request to a call from now on."""
        call.expect(request_id)
        self._calls[request_id] = call

    def end(self, call: Completions) -> None:
        """Remove a call."""
        for request_id in call:
            del self._calls[request_id]

    def is_expected(self, request_id: str) -> bool:
        """Whether an active call has a request of this id."""
        return request_id in self._calls

    def report(self, output: RequestOutput) -> None:
        """Queue an output for its call."""
        call = self._calls.get(output.request_id)
        (self._unreported if call is None else call.mail).append(output)

    @property
    def has_unreported(self) -> bool:
        """Whether there are outputs for the next ``step``."""
        return bool(self._unreported)

    def swap(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Return the outputs for ``step``, and store ``outputs`` in their place."""
        unreported, self._unreported = self._unreported, outputs
        return unreported

    def put_back(self, outputs: list[RequestOutput]) -> None:
        """Store outputs that could not be returned, for the next ``step``."""
        self._unreported = outputs + self._unreported


class FairLock:
    """A re-entrant lock that no thread acquires twice while another one waits.

    One thread waits for the lock itself, the others for their turn to do so. A thread that acquires it again
    right after release queues behind them.

    Not safe against Ctrl-C during acquire and release: use it within ``interrupts_deferred``.
    """

    def __init__(self) -> None:
        self._next, self._lock = Lock(), Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._owner != get_ident():
            with self._next:
                self._lock.acquire()
            self._owner = get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._lock.release()
