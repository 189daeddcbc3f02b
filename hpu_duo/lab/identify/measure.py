"""Identification by measurement: scores read off the unchanged model's attention, without gradients.

Legend: as in ``attention``; N queries that are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from hpu_duo.lab.identify.attention import Band, Weighing, block_scores, causal_weights, with_sinks
from hpu_duo.lab.identify.dataset import PasskeyDataset
from hpu_duo.lab.identify.gated_model import GatedModel, TeacherAttention, attend_as_model, weighing_of
from hpu_duo.lab.identify.objective import Gates
from hpu_duo.lab.identify.workers import Workers
from hpu_duo.modeling.attention import AttentionCall, Trial, attending

_QUERIES_AT_ONCE = 32
MEAN_QK_TOKENS = 500
"""Length of the texts whose mean query and key are taken, as in kvpress."""


def distant_mass(q: Tensor, k: Tensor, positions: Tensor, weighing: Weighing, band: Band) -> Tensor:
    """Share of attention on keys that a streaming head would not see, averaged over queries.

    Args:
        q: ``[1, H, N, D]``, queries at ``positions``.
        k: ``[1, K, T, D]``, all keys.
        positions: int64 ``[N]``.

    Returns:
        float64 ``[H]``.
    """
    key = torch.arange(k.shape[2], device=k.device)
    total = torch.zeros(q.shape[1], dtype=torch.float64, device=q.device)
    for q_part, at in zip(q.split(_QUERIES_AT_ONCE, dim=2), positions.split(_QUERIES_AT_ONCE)):
        weights = causal_weights(q_part, k, at, weighing)
        is_distant = (key >= band.sink) & (key <= at.unsqueeze(1) - band.recent)
        total += (weights * is_distant).sum(dim=(0, 2, 3), dtype=torch.float64)
    return total / len(positions)


def most_attended(q: Tensor, k: Tensor, positions: Tensor, weighing: Weighing) -> Tensor:
    """The key that each query attends to most; a sink logit is no key.

    Args:
        q: ``[1, H, N, D]``, queries at ``positions``.
        k: ``[1, K, T, D]``, all keys.
        positions: int64 ``[N]``.

    Returns:
        int64 ``[H, N]``, positions of keys.
    """
    parts = zip(q.split(_QUERIES_AT_ONCE, dim=2), positions.split(_QUERIES_AT_ONCE))
    found = [causal_weights(q_part, k, at, weighing)[0].argmax(dim=-1) for q_part, at in parts]
    return torch.cat(found, dim=-1)


def mean_qk_score(q: Tensor, k: Tensor, weighing: Weighing) -> Tensor:
    """Reach of attention by position alone, with the content of the text averaged away.

    Args:
        q, k: ``[1, H or K, T, D]``, the same mean query and mean key at each position, rotated by it.

    Returns:
        float64 ``[H]`` in (0, 1): the area under the attention of the last query summed up from the first
        key on. 1/2 for a head that spreads evenly, near 0 for one that looks at its neighbours only.
    """
    scores = block_scores(q[:, :, -1:], k, weighing)
    weights = torch.softmax(with_sinks(scores, weighing), dim=-1)[..., : k.shape[2]]
    return weights.double().cumsum(dim=-1).mean(dim=-1).flatten()


class _Profile(Trial):
    """The model's own attention, with the distant mass of each layer on the way."""

    def __init__(self, calls: Mapping[int, AttentionCall], positions: Tensor, band: Band) -> None:
        self._calls, self._positions, self._band = calls, positions, band
        self.masses: dict[int, Tensor] = {}

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        call = self._calls[id(module)]
        if call.sliding_window is None:
            queries = q[:, :, self._positions]
            weighing = weighing_of(call, sinks)
            self.masses[id(module)] = distant_mass(queries, k, self._positions, weighing, self._band)
        return attend_as_model(call, q, k, v, sinks).transpose(1, 2).contiguous()


class _MostAttended(Trial):
    """The model's own attention, with the most attended keys of each layer on the way."""

    def __init__(self, calls: Mapping[int, AttentionCall], positions: Tensor) -> None:
        self._calls, self._positions = calls, positions
        self.keys: dict[int, Tensor] = {}

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        call = self._calls[id(module)]
        if call.sliding_window is None:
            queries = q[:, :, self._positions]
            self.keys[id(module)] = most_attended(queries, k, self._positions, weighing_of(call, sinks))
        return attend_as_model(call, q, k, v, sinks).transpose(1, 2).contiguous()


class _MeanScore(Trial):
    """Replaces one layer's attention: notes the score and returns zeros."""

    def __init__(self, call: AttentionCall) -> None:
        self._call = call
        self.score: Tensor | None = None

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        self.score = mean_qk_score(q, k, weighing_of(self._call, sinks))
        return torch.zeros_like(q).transpose(1, 2).contiguous()


def profile_scores(model: GatedModel, dataset: PasskeyDataset, index: int, band: Band) -> Gates:
    """Distant mass of each KV head ``[L, K]`` over the labelled tokens of document ``index``.

    A KV head is needed as much as the neediest of its query heads, so it gets their maximum; layers with a
    window get 0.
    """
    sample = dataset.sample(index)
    positions = torch.from_numpy(sample.labelled).to(model.device)
    trial = _Profile(model.calls, positions, band)
    with torch.no_grad():
        model.hidden(torch.from_numpy(sample.ids), trial)
    return _per_kv_head(model, trial.masses, lambda grouped: grouped.amax(dim=1))


def retrieval_scores(model: GatedModel, dataset: PasskeyDataset, index: int) -> Gates:
    """Retrieval score of each KV head ``[L, K]`` on document ``index``; layers with a window get 0.

    That of a query head is the share of passkey tokens that it copies. It copies one if, in the step in which
    the model says the token, it attends most to the same token in the needle that tells the passkey. A KV
    head gets the largest score of its query heads.

    Source: Wu et al. 2024, Retrieval Head Mechanistically Explains Long-Context Factuality
    (arXiv:2404.15574). There the model goes on from its own answers, here from the right ones.
    """
    sample = dataset.sample(index)
    sizes = sample.answer_ends - sample.questions
    tokens = [np.arange(start, end) for start, end in zip(sample.questions, sample.answer_ends)]
    steps = torch.from_numpy(np.concatenate(tokens)).to(model.device)
    starts, ends = torch.from_numpy(np.repeat(sample.needles, sizes, axis=0)).to(model.device).unbind(dim=1)
    ids = torch.from_numpy(sample.ids).to(model.device)
    trial = _MostAttended(model.calls, steps - 1)
    with torch.no_grad():
        hidden = model.hidden(ids, trial)[steps - 1]
        is_said = model.next_tokens(hidden) == ids[steps]
    copied = {
        module: (is_said & (starts <= keys) & (keys < ends) & (ids[keys] == ids[steps])).double().mean(dim=1)
        for module, keys in trial.keys.items()
    }
    return _per_kv_head(model, copied, lambda grouped: grouped.amax(dim=1))


def mean_qk_scores(model: GatedModel, dataset: PasskeyDataset, index: int) -> Gates:
    """Mean-q/k score of each KV head ``[L, K]`` on filler text ``index``; layers with a window get 0.

    The attention module is run once more on the average of its inputs: it then passes its mean query and mean
    key at every position to attention, whatever the family computes on the way. Query heads of a KV head
    are averaged.

    Source: kvpress (NVIDIA), DuoAttention press with on-the-fly scores.
    """
    scores: dict[int, Tensor] = {}
    ids = torch.from_numpy(dataset.filler(index, MEAN_QK_TOKENS))
    handles = [
        layer.attention.register_forward_pre_hook(_averaging(layer.call, scores), with_kwargs=True)
        for layer in model.layers
        if layer.call.sliding_window is None
    ]
    try:
        with torch.no_grad():
            model.hidden(ids, TeacherAttention(model.calls, frozenset()))
    finally:
        for handle in handles:
            handle.remove()
    return _per_kv_head(model, scores, lambda grouped: grouped.mean(dim=1))


def measured(
    score: Callable[[int], Gates], num_samples: int, workers: Workers
) -> Iterator[tuple[int, Gates | None]]:
    """Average ``score`` over samples, shared by the processes.

    Yields:
        The number of samples done, and the average ``[L, K]`` once all are.
    """
    share = workers.share(num_samples)
    rows = []
    for done, index in enumerate(share, start=1):
        rows.append(score(index))
        if done < len(share):
            yield done * workers.size, None
    yield num_samples, workers.gather(np.stack(rows)).mean(axis=0)


def _averaging(call: AttentionCall, scores: dict[int, Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        positional = list(args)
        if positional:
            positional[0] = _averaged(positional[0])
        else:
            kwargs = {**kwargs, "hidden_states": _averaged(kwargs["hidden_states"])}
        trial = _MeanScore(call)
        # Not called as a module, which would enter this hook again.
        with attending(module, trial):
            module.forward(*positional, **kwargs)
        assert trial.score is not None
        scores[id(module)] = trial.score

    return hook


def _averaged(hidden: object) -> Tensor:
    assert isinstance(hidden, Tensor)
    return hidden.mean(dim=1, keepdim=True).expand_as(hidden)


def _per_kv_head(
    model: GatedModel, by_module: Mapping[int, Tensor], join: Callable[[Tensor], Tensor]
) -> Gates:
    # A head of a layer whose keys others read is needed as much as the neediest reader needs it.
    scores = np.zeros((model.num_layers, model.num_kv_heads))
    for row, layer in zip(model.rows, model.layers):
        if id(layer.attention) in by_module:
            found = join(by_module[id(layer.attention)].view(model.num_kv_heads, -1)).cpu().numpy()
            scores[row] = np.maximum(scores[row], found) if layer.call.source is not None else found
    return scores
