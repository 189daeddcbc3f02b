"""Questions to long documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpu_duo.lab.traces.arrival import Arrival
from hpu_duo.lab.traces.lengths import Lengths
from hpu_duo.lab.traces.rate import Rate
from hpu_duo.lab.traces.session import Session
from hpu_duo.lab.traces.workloads.workload import check_fields


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
