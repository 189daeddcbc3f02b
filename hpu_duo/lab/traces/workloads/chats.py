"""Conversations of people with a model, agents, and questions on documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpu_duo.lab.traces.arrival import Arrival, Lengths, Rate
from hpu_duo.lab.traces.session import Session, Turn
from hpu_duo.lab.traces.workloads.workload import check_fields, first_requests

_SYSTEM_PROMPT = 0


@dataclass(frozen=True)
class Chats:
    """Chats under one system prompt: each turn has the whole chat in its prompt.

    Attributes:
        per_s: chats that begin, per second.
        turns: requests of a chat on average; their number is geometric.
        pause_s: seconds on average in which a person reads and writes; exponential.
        messages, outputs: lengths of what people write, and of the answers.
        system_len: tokens of the system prompt; 0 for none.
        num_users: each chat is of one of them at random.
        seed: other seeds give other chats.
    """

    per_s: float = 0.2
    turns: float = 5.0
    pause_s: float = 20.0
    messages: Lengths = Lengths(64, 1.0)
    outputs: Lengths = Lengths(192, 0.8)
    system_len: int = 512
    num_users: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, turns=1, pause_s=0, system_len=0, num_users=1, seed=0)
        Rate(self.per_s)  # refuses what is out of range

    def sessions(self, num_requests: int) -> list[Session]:
        """Draw chats with ``num_requests`` requests together."""
        rng = np.random.default_rng(self.seed)
        # A chat has a request at least, so there are enough of them.
        times = Rate(self.per_s).times(num_requests, rng).tolist()
        return first_requests([self._chat(time, rng) for time in times], num_requests)

    def _chat(self, time_s: float, rng: np.random.Generator) -> Session:
        num = int(rng.geometric(1 / self.turns))
        messages, outputs = self.messages.draw(num, rng), self.outputs.draw(num, rng)
        pauses = rng.exponential(self.pause_s, num).tolist()
        first = Arrival(
            time_s,
            self.system_len + messages[0],
            outputs[0],
            block_ids=(_SYSTEM_PROMPT,) if self.system_len else (),
            block_size=max(1, self.system_len),
            user=f"user {int(rng.integers(self.num_users))}" if self.num_users > 1 else None,
        )
        return Session(first, tuple(map(Turn, pauses[1:], messages[1:], outputs[1:])))


@dataclass(frozen=True)
class Agents:
    """Tasks that agents of a few kinds work on: short outputs, long results of tools, hardly a pause.

    Agents of a kind share their instructions and descriptions of tools. Each step's prompt is all that was
    said before and the result of the tool that was called.

    Attributes:
        per_s: tasks that begin, per second.
        steps: requests of a task on average; their number is geometric.
        num_kinds, instructions_len: different instructions, and their tokens.
        tasks, results, outputs: lengths of the task, of a tool's result, and of a call.
        tool_s: seconds that a tool takes on average; exponential.
        seed: other seeds give other tasks.
    """

    per_s: float = 0.1
    steps: float = 12.0
    num_kinds: int = 3
    instructions_len: int = 3000
    tasks: Lengths = Lengths(200, 0.6)
    results: Lengths = Lengths(400, 1.2)
    outputs: Lengths = Lengths(60, 0.6)
    tool_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, steps=1, num_kinds=1, instructions_len=1, tool_s=0, seed=0)
        Rate(self.per_s)  # refuses what is out of range

    def sessions(self, num_requests: int) -> list[Session]:
        """Draw tasks with ``num_requests`` requests together."""
        rng = np.random.default_rng(self.seed)
        times = Rate(self.per_s).times(num_requests, rng).tolist()
        return first_requests([self._task(time, rng) for time in times], num_requests)

    def _task(self, time_s: float, rng: np.random.Generator) -> Session:
        num = int(rng.geometric(1 / self.steps))
        kind, (task,) = int(rng.integers(self.num_kinds)), self.tasks.draw(1, rng)
        results, outputs = self.results.draw(num, rng), self.outputs.draw(num, rng)
        pauses = rng.exponential(self.tool_s, num).tolist()
        first = Arrival(
            time_s,
            self.instructions_len + task,
            outputs[0],
            block_ids=(kind,),
            block_size=self.instructions_len,
            user=f"agent {kind}",
        )
        return Session(first, tuple(map(Turn, pauses[1:], results[1:], outputs[1:])))


@dataclass(frozen=True)
class Documents:
    """Questions, each to one of some documents that its prompt begins with; some documents are popular.

    Attributes:
        per_s: questions per second.
        num_documents: a document's share of the questions falls with its rank as ``rank ** -skew`` (Zipf).
        documents: their lengths.
        questions, outputs: lengths of questions and answers.
        skew: 0 asks all documents equally often.
        seed: other seeds give other documents and questions.
    """

    per_s: float = 0.5
    num_documents: int = 20
    documents: Lengths = Lengths(8000, 0.5)
    questions: Lengths = Lengths(40, 0.5)
    outputs: Lengths = Lengths(150, 0.6)
    skew: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, num_documents=1, skew=0, seed=0)
        Rate(self.per_s)  # refuses what is out of range

    def sessions(self, num_requests: int) -> list[Session]:
        """Draw ``num_requests`` questions."""
        rng = np.random.default_rng(self.seed)
        lengths = self.documents.draw(self.num_documents, rng)
        shares = np.arange(1, self.num_documents + 1.0) ** -self.skew
        asked = rng.choice(self.num_documents, num_requests, p=shares / shares.sum()).tolist()
        times = Rate(self.per_s).times(num_requests, rng).tolist()
        questions, outputs = (each.draw(num_requests, rng) for each in (self.questions, self.outputs))
        return [
            Session(
                Arrival(
                    times[at],
                    lengths[document] + questions[at],
                    outputs[at],
                    block_ids=(document,),
                    block_size=lengths[document],
                )
            )
            for at, document in enumerate(asked)
        ]
