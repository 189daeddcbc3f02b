"""Runs a planned step in groups of rows, so that a layer's weights are loaded once for all groups."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from hpu_duo.engine.batch import exact_shape
from hpu_duo.engine.executor import Executor, LaunchedStep, bucket_step
from hpu_duo.engine.on_host.attention import HostAttention
from hpu_duo.engine.on_host.rows import HostContext
from hpu_duo.engine.step_input import StepInput, StepResult
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.engine.stepper import NO_ERRORS, Runner, StepHandle
from hpu_duo.engine.zigzag.turns import LayerTurns
from hpu_duo.engine.zigzag.waiting import WaitingOnHost
from hpu_duo.modeling.weight_stream import mover_for
from hpu_duo.sampling import SamplingRow, TokenLogprobs


class Group(NamedTuple):
    """Some rows of a step.

    Attributes:
        plan: a step of these rows.
        ring_rows: the row of each of them in the whole step.
    """

    plan: StepPlan
    ring_rows: tuple[int, ...]


def cut(plan: StepPlan, num_groups: int, *, keeps_rows: bool) -> list[Group]:
    """Cut a step into groups of about equal numbers of tokens; fewer groups if it has too few rows.

    Copies and transfers of the step belong to the first group, which begins first.

    Args:
        keeps_rows: rows have states, so that each keeps its number, and all prompts are in one group: a step
            copies those of prompts to one place.
    """
    sizes = [row.num_new_tokens for row in plan.rows]
    num_single = sum(size <= plan.decode_len for size in sizes) if keeps_rows else len(sizes)
    lumps = [*sizes[:num_single], *([sum(sizes[num_single:])] if num_single < len(sizes) else [])]
    middles = np.cumsum(lumps) - np.array(lumps) / 2
    of_lump = np.minimum(num_groups - 1, middles * num_groups // sum(sizes)).astype(int).tolist()
    of_row = of_lump[:num_single] + of_lump[-1:] * (len(sizes) - num_single)
    groups, whole = list[Group](), plan.rows
    for number in sorted(set(of_row)):
        rows = [row for row, group in zip(whole, of_row) if group == number]
        ring_rows = tuple(row.ring_row for row in rows)
        if not keeps_rows:
            rows = [row._replace(ring_row=place) for place, row in enumerate(rows)]
        groups.append(Group(replace(plan, rows=tuple(rows)), ring_rows))
        plan = replace(plan, moves=(), transfers=None)
    return groups


class ZigZagRunner(Runner):
    """Runs a step as several ones whose layers take turns.

    A layer whose weights are streamed computes all groups before the next one's weights are needed.

    Args:
        num_groups: most groups of a step.
        max_num_tokens: most tokens of a step.
        host: stores of blocks on the host, and attention to them; None = all are on the device.
        away: numbers of groups whose hidden states lie on the host while they wait.

    Attributes:
        notes: what a user should know.
    """

    def __init__(
        self,
        executor: Executor,
        vocab_size: int,
        max_model_len: int,
        num_groups: int,
        max_num_tokens: int,
        host: HostAttention | None = None,
        away: Sequence[int] = (),
    ) -> None:
        super().__init__(executor, vocab_size, max_model_len)
        self.host = host
        self._num_groups, self._keeps_rows = num_groups, executor.geometry.uses_rows
        self._inputs = [executor.inputs, *(executor.inputs.another() for _ in range(num_groups - 1))]
        waiting = None
        if away:
            up, down = (mover_for(executor.runtime, executor.device) for _ in range(2))
            model = executor.model.model
            of_token = model.config.get_text_config().hidden_size * model.dtype.itemsize
            waiting = WaitingOnHost(away, max_num_tokens * of_token, up, down)
        self.turns = LayerTurns(executor.model.running, num_groups, executor.device, waiting)
        self.notes = () if waiting is None else (waiting.describe(num_groups),)

    def launch(
        self,
        plan: StepPlan,
        sampling: Mapping[int, Sequence[SamplingRow]],
        errors: Mapping[int, Exception] = NO_ERRORS,
    ) -> StepHandle:
        """Build a message for each group, and put their work on the device; see ``Runner.launch``."""
        groups = cut(plan, self._num_groups, keeps_rows=self._keeps_rows)
        if (stream := self.executor.model.stream) is not None:
            stream.num_parts = 1 if self.turns.waiting is None else len(groups)
        if self.host is None:
            return self._launch_groups(plan, groups, sampling, errors)
        try:
            plans = [group.plan for group in groups] if len(groups) > 1 else [plan]
            self.host.begin(*map(HostContext.of, plans))
            if stream is not None and self.host.moves_blocks:
                stream.num_parts = len(groups)
            return self._launch_groups(plan, groups, sampling, errors)
        finally:
            self.host.end()

    def _launch_groups(
        self,
        plan: StepPlan,
        groups: Sequence[Group],
        sampling: Mapping[int, Sequence[SamplingRow]],
        errors: Mapping[int, Exception],
    ) -> StepHandle:
        if len(groups) == 1:
            return super().launch(plan, sampling, errors)
        built = []
        for group in groups:
            rows = {row.ring_row: ring_row for row, ring_row in zip(group.plan.rows, group.ring_rows)}
            of_group = {row: sampling[ring_row] for row, ring_row in rows.items() if ring_row in sampling}
            built.append(self.builder.build(group.plan, of_group))
        began = time.perf_counter()
        launched = self._launch([each.message for each in built])
        handles = tuple(
            StepHandle(group.plan, *each, 0.0, NO_ERRORS) for group, each in zip(groups, zip(built, launched))
        )
        return StepHandle(plan, built[0], launched[0], time.perf_counter() - began, errors, handles)

    @torch.inference_mode()
    def _launch(self, messages: Sequence[StepInput]) -> list[LaunchedStep]:
        executor = self.executor
        model, geometry = executor.model, executor.geometry
        with executor.runtime.step():
            steps = []
            for message, inputs in zip(messages, self._inputs):
                executor.inputs = inputs
                step = bucket_step(model, geometry, message.bucket, {})
                steps.append(partial(step, executor.prepare(message)))
            executor.inputs = self._inputs[0]

            def enter(number: int) -> None:
                message = messages[number]
                model.live.set(message.shape, message.bucket, geometry.row_len(message.bucket))
                if self.host is not None:
                    self.host.enter_group(number)

            launched = []
            for message, logits in zip(messages, self.turns.run(steps, enter)):
                tokens = None
                if message.sampling is not None:
                    tokens = executor.tokens(logits, message.sampling)
                on_device = logits if message.host_sampled else None
                launched.append(LaunchedStep(message, tokens, on_device, None))
        return launched

    def finish(self, handle: StepHandle) -> StepResult:
        """Wait for all groups, and join their results; see ``Runner.finish``."""
        if not handle.groups:
            return super().finish(handle)
        began = time.perf_counter()
        results = [super(ZigZagRunner, self).finish(each) for each in handle.groups]
        errors = {row: (0, error) for row, error in handle.errors.items()}
        begin = 0
        for group, result in zip(handle.groups, results):
            whole = handle.plan.rows[begin : begin + len(group.plan.rows)]
            ring_rows = {row.ring_row: true.ring_row for row, true in zip(group.plan.rows, whole)}
            errors.update({ring_rows[row]: error for row, error in result.errors.items()})
            begin += len(whole)
        shape = exact_shape(handle.plan, self.executor.geometry.block_size)
        return StepResult(
            replace(handle.built.message, shape=shape, bucket=shape),
            np.concatenate([result.token_ids for result in results]),
            _joined(results),
            handle.device_s + time.perf_counter() - began,
            errors,
        )


def _joined(results: Sequence[StepResult]) -> TokenLogprobs | None:
    """Log-probabilities of all groups, one after the other; zeros for tokens without any."""
    most = max((each.logprobs.top.shape[1] for each in results if each.logprobs is not None), default=-1)
    if most < 0:
        return None
    parts = []
    for each in results:
        found, num = each.logprobs, len(each.token_ids)
        if found is None:
            ids, zeros = torch.zeros(num, 0, dtype=torch.int32), torch.zeros(num, 0)
            found = TokenLogprobs(torch.zeros(num), torch.zeros(num, dtype=torch.int32), ids, zeros)
        width = most - found.top.shape[1]
        parts.append(found._replace(top_ids=pad(found.top_ids, (0, width)), top=pad(found.top, (0, width))))
    return TokenLogprobs(*map(torch.cat, zip(*parts)))
