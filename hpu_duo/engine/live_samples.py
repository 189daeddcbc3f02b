"""Samples that have not ended, by the request that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpu_duo.engine.output_text import SampleState


class LiveSamples:
    """States of the samples that have not ended, by their own names and by the requests they belong to."""

    def __init__(self) -> None:
        self._states: dict[str, SampleState] = {}
        self._names: dict[str, list[str]] = {}

    def add(self, request_id: str, states: Sequence[SampleState]) -> None:
        """Add all samples of a request."""
        self._names[request_id] = [state.request.request_id for state in states]
        self._states.update((state.request.request_id, state) for state in states)

    def remove(self, name: str) -> None:
        """Remove a sample, and its request with the last of them."""
        request_id = self._states.pop(name).public_id
        self._names[request_id].remove(name)
        if not self._names[request_id]:
            del self._names[request_id]

    def get(self, name: str) -> SampleState | None:
        """The state of a sample, None when it has ended."""
        return self._states.get(name)

    def __getitem__(self, name: str) -> SampleState:
        return self._states[name]

    def of(self, request_id: str) -> list[SampleState]:
        """Samples of a request that have not ended, in order; none for an unknown one."""
        return [self._states[name] for name in self._names.get(request_id, ())]

    def is_live(self, request_id: str) -> bool:
        """Whether a request has samples that have not ended."""
        return request_id in self._names

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[SampleState]:
        return iter(self._states.values())
