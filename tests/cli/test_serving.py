"""The loop under the commands: order, measures, interruption."""

from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hpu_duo import HPUDuoModel, SamplingParams
from hpu_duo.cli.text.run import LiveView, Run
from hpu_duo.engine.outputs import RequestOutput


@dataclass
class Recorder:
    """Notes what a view is told; may play a user who presses Ctrl-C."""

    interrupt_after: int | None = None
    prefill: list[tuple[int, int]] = field(default_factory=list)
    received_from: list[int] = field(default_factory=list)
    num_ends: int = 0

    is_streamed = False

    def prefilled(self, done: int, total: int) -> None:
        self.prefill.append((done, total))

    def received(self, index: int, output: RequestOutput) -> None:
        self.received_from.append(index)
        if len(self.received_from) == self.interrupt_after:
            raise KeyboardInterrupt

    def ended(self) -> None:
        self.num_ends += 1


@pytest.fixture
def model(model_dir: Path) -> HPUDuoModel:
    return HPUDuoModel.from_pretrained(model_dir, block_size=8, max_num_seqs=4, max_num_batched_tokens=16)


GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_prefill_is_reported_after_every_chunk_and_counts_each_token_once(model: HPUDuoModel) -> None:
    view = Recorder()
    report = Run(model.engine, [list(range(3, 53))], [GREEDY]).finish(view)
    assert view.prefill[:4] == [(16, 50), (32, 50), (48, 50), (50, 50)]
    assert report.prefill.num_tokens == 50
    # The first of the four tokens comes with the last chunk.
    assert report.decode.num_tokens == 3
    assert view.num_ends == 1


def test_completions_come_in_the_order_of_the_prompts(model: HPUDuoModel) -> None:
    prompts = [list(range(3, 3 + length)) for length in (40, 2, 17, 9, 5)]
    report = Run(model.engine, prompts, [GREEDY] * 5).finish(Recorder())
    alone = model.engine.generate(prompts, GREEDY)
    assert [one.token_ids for one in report.completions] == [samples[0].token_ids for samples in alone]


def test_an_interrupted_run_keeps_what_came_and_frees_everything(model: HPUDuoModel) -> None:
    view = Recorder(interrupt_after=3)
    report = Run(model.engine, [[5, 6, 7]], [GREEDY]).finish(view)
    assert report.is_interrupted
    assert len(report.completions[0].token_ids) == 3
    assert report.completions[0].finish_reason is None
    assert view.num_ends == 1
    assert (model.stats().num_running, model.stats().used_blocks) == (0, 0)


def test_one_refused_prompt_leaves_nothing_behind(model: HPUDuoModel) -> None:
    with pytest.raises(ValueError, match=r"^prompt 2 needs at least one prompt token"):
        Run(model.engine, [[5, 6], []], [GREEDY, GREEDY])
    assert (model.stats().num_running, model.stats().num_waiting) == (0, 0)


def test_the_bar_shows_done_and_total_and_is_gone_before_text_comes() -> None:
    screen, text = StringIO(), StringIO()
    view = LiveView(Console(file=screen, force_terminal=True, width=80), text)
    view.prefilled(512, 2048)
    view.prefilled(2048, 2048)
    drawn = screen.getvalue()
    assert " 512/2048" in drawn
    view.received(0, RequestOutput("request-0", 0, (5,), text="Hello"))
    view.ended()
    assert text.getvalue() == "Hello\n"
    assert screen.getvalue() == drawn


def test_no_bar_is_drawn_where_there_is_no_terminal() -> None:
    screen = StringIO()
    view = LiveView(Console(file=screen, force_terminal=False), None)
    view.prefilled(512, 2048)
    view.ended()
    assert screen.getvalue() == ""
