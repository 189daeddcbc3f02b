"""Runs steps of which some rows have blocks on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpu_duo.engine.executor import Executor
from hpu_duo.engine.on_host.attention import HostAttention, check_specs
from hpu_duo.engine.on_host.captured import BucketSizes, CapturedHostAttention, copies_of
from hpu_duo.engine.on_host.choice import HostDecodes
from hpu_duo.engine.on_host.crossing import crossing_of
from hpu_duo.engine.on_host.rows import HostContext
from hpu_duo.engine.on_host.tiles import GroupAhead
from hpu_duo.engine.on_host.worker import WorkerThread
from hpu_duo.engine.step_plan import StepPlan
from hpu_duo.engine.stepper import NO_ERRORS, Runner, StepHandle
from hpu_duo.sampling import SamplingRow

_GIB = 1 << 30


def attention_there(
    executor: Executor,
    num_blocks: int,
    mode: HostDecodes,
    ahead: GroupAhead | None = None,
    *,
    is_captured: bool = False,
) -> HostAttention:
    """Return stores of the host, to which the layers of a model attend from now on.

    Args:
        num_blocks: blocks of the host.
        mode: how decodes attend to them; where steps are captured, ``ATTEND``.
        ahead: see ``HostAttention``.
        is_captured: graphs of layers are cut for it.

    Raises:
        ValueError: the model has heads that are not served.
    """
    check_specs(executor.model.specs, executor.model.recurrences)
    specs = executor.model.specs
    known, enter = (executor.store.layers, specs, num_blocks, WorkerThread()), None
    host: HostAttention
    if is_captured:
        num_rows = executor.largest.num_logits * executor.geometry.decode_len
        largest = BucketSizes.of(specs, executor.largest.query_len, num_rows)
        host = captured = CapturedHostAttention(*known, copies_of(executor.runtime), largest)
        captured.warm_up()
        enter = captured.enter
    else:
        host = HostAttention(*known, crossing_of(executor.runtime), ahead)
    if mode is HostDecodes.AUTO:
        host.measure(specs)
    else:
        host.moves_decodes = mode is HostDecodes.MOVE
    executor.model.attend_elsewhere(host.of_layers(len(specs)), enter)
    return host


def describe(host: HostAttention, block_size: int) -> str:
    """Return a note on what the host holds."""
    return (
        f"up to {host.num_blocks * block_size:,} tokens of running requests, "
        f"{host.num_bytes / _GIB:,.3g} GiB, lie on the host; {_decodes(host)}; "
        f"{host.staging_bytes / 2**20:,.3g} MiB of device memory buffer blocks that move to it"
    )


def _decodes(host: HostAttention) -> str:
    rates, moves = host.rates, host.moves_decodes
    if rates is None:
        return "decodes move them to the device" if moves else "decodes attend to them there"
    link, there, device = (f"{each / 1e9:,.3g} GB/s" for each in rates[:3])
    moved = f"copied at {link}, attended to at {there} there, {device} on the device"
    if rates.tile is not None:
        moved = f"attended to at {there} there, copied and attended to at {device}"
    tile = rates.call if rates.tile is None else rates.tile
    return (
        "each step's decodes attend to them there, or move them to the device where that is predicted to "
        f"be faster ({moved}, and {1e6 * tile:,.3g} us a tile)"
    )


class HostRunner(Runner):
    """Runs steps whose rows attend to blocks on the host too.

    Args:
        host: the stores there, and attention to them.
    """

    def __init__(self, executor: Executor, vocab_size: int, max_model_len: int, host: HostAttention) -> None:
        super().__init__(executor, vocab_size, max_model_len)
        self.host = host

    def launch(
        self,
        plan: StepPlan,
        sampling: Mapping[int, Sequence[SamplingRow]],
        errors: Mapping[int, Exception] = NO_ERRORS,
    ) -> StepHandle:
        """Copy blocks to the host, and run the step; see ``Runner.launch``."""
        try:
            self.host.begin(HostContext.of(plan))
            return super().launch(plan, sampling, errors)
        finally:
            self.host.end()
