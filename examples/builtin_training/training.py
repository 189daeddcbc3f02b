"""The curriculum and the optimiser loop."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from builtin_training.attention import HeadPlan
from builtin_training.batches import IGNORE, Batch, BatchMaker, Task
from builtin_training.initialisation import SHIPPED, Shape, build_model

# The heads that may retrieve: two layers, and each of them also has streaming heads.
MIDDLE, LATE = (0, 2), (1, 3)
Plan = tuple[tuple[int, ...], ...]
"""For each layer, the KV heads that see everything."""


def retrieval_plans(num_layers: int) -> tuple[Plan, ...]:
    """The plans to draw from: both pairs, or one of them, the later one twice as often.

    The pairs lie a quarter and half of the way up: in layers 1 and 2 of the shipped four.
    """

    def plan(middle: bool, late: bool) -> Plan:
        chosen = {num_layers // 4: MIDDLE if middle else (), num_layers // 2: LATE if late else ()}
        return tuple(chosen.get(layer, ()) for layer in range(num_layers))

    return (plan(True, True), plan(True, False), plan(False, True), plan(False, True))


RETRIEVAL_PLANS = retrieval_plans(SHIPPED.num_layers)

MUON_LR, ADAM_LR = 6e-3, 5e-3
LM_WEIGHT, LM_POSITIONS = 0.3, 1024
FIRST_WARMUP, STAGE_WARMUP = 40, 20


@dataclass(frozen=True)
class Stage:
    """One length of the curriculum.

    Attributes:
        task: the documents.
        num_steps: optimiser steps.
        lr: factor on the base learning rates.
        masked: share of batches in which only the chosen heads see further than ``sink`` + ``recent`` tokens.
        sink, recent: tokens, for the masked batches.
        decay: whether the learning rate falls linearly to zero over the stage.
    """

    task: Task
    num_steps: int
    lr: float
    masked: float
    sink: int = 16
    recent: int = 64
    decay: bool = False


CURRICULUM: tuple[Stage, ...] = (
    Stage(Task(64, 64, (1, 2), (1, 6), 0.15, 0.5), 200, 1.0, masked=0.75, sink=4, recent=16),
    Stage(Task(128, 64, (2, 4), (1, 8), 0.15, 0.2), 60, 1.0, masked=0.75, sink=16, recent=32),
    Stage(Task(256, 32, (2, 6), (2, 16), 0.15, 0.1), 40, 0.8, masked=0.75),
    Stage(Task(512, 16, (2, 8), (4, 24), 0.15, 0.05), 40, 0.7, masked=0.75),
    Stage(Task(1024, 8, (3, 10), (6, 32), 0.15), 50, 0.6, masked=0.75),
    Stage(Task(2048, 4, (3, 10), (6, 32), 0.15), 90, 0.5, masked=0.75),
    Stage(Task(4096, 2, (3, 10), (6, 32), 0.15), 70, 0.4, masked=0.75, decay=True),
)


@dataclass
class Progress:
    """Progress of a run; saved with the checkpoint so that it can be resumed."""

    stage: int = 0
    step: int = 0
    total: int = 0


class Trainer:
    """Owns the model, its optimisers and the position in the curriculum.

    Args:
        batches: the batch maker.
        seed: fixes initialisation, data and the order of masks.
        checkpoint: file for resuming; read if it exists, written after every stage and every 50 steps.
        shape: sizes of the model.
        device: of the training; the initial weights are the same on each.
        lr: factor on all learning rates.
    """

    def __init__(
        self,
        batches: BatchMaker,
        seed: int,
        checkpoint: Path,
        shape: Shape = SHIPPED,
        device: str = "cpu",
        lr: float = 1.0,
    ) -> None:
        self.model = build_model(seed, shape).to(device)
        self._plans = retrieval_plans(shape.num_layers)
        self._lr = lr
        self._batches = batches
        self._seed = seed
        self._checkpoint = checkpoint
        self._progress = Progress()
        self._optimisers = _build_optimisers(self.model)
        self._base_lrs = [group["lr"] for optimiser in self._optimisers for group in optimiser.param_groups]
        if checkpoint.exists():
            self._load()

    def run(self, curriculum: tuple[Stage, ...]) -> None:
        """Train to the end of the curriculum, printing a line every ten steps."""
        for stage, step in self._remaining(curriculum):
            started = time.perf_counter()
            rng = torch.Generator().manual_seed(self._seed * 1_000_003 + self._progress.total)
            plan = draw_plan(stage, rng, self._plans)
            seed = int(torch.randint(2**31, (), generator=rng))
            batch = self._batches.make(stage.task, seed).to(self.model.device)
            self._set_lr(stage, step)
            losses = self._step(batch, plan, rng)
            self._advance(curriculum)
            if step % 10 == 0:
                print(
                    f"T={stage.task.num_tokens} step {step}/{stage.num_steps} "
                    f"{'full' if plan is None else 'masked ' + str(plan.retrieval)} {losses} "
                    f"{time.perf_counter() - started:.2f} s/step",
                    flush=True,
                )

    def _remaining(self, curriculum: tuple[Stage, ...]) -> Iterator[tuple[Stage, int]]:
        while self._progress.stage < len(curriculum):
            yield curriculum[self._progress.stage], self._progress.step

    def _advance(self, curriculum: tuple[Stage, ...]) -> None:
        progress = self._progress
        progress.step += 1
        progress.total += 1
        stage_ended = progress.step == curriculum[progress.stage].num_steps
        if stage_ended:
            progress.stage, progress.step = progress.stage + 1, 0
        if stage_ended or progress.step % 50 == 0:
            self._save()

    def _set_lr(self, stage: Stage, step: int) -> None:
        warmup = FIRST_WARMUP if self._progress.stage == 0 else STAGE_WARMUP
        factor = self._lr * stage.lr * min(1.0, (step + 1) / warmup)
        if stage.decay:
            factor *= 1 - step / stage.num_steps
        groups = [group for optimiser in self._optimisers for group in optimiser.param_groups]
        for group, base in zip(groups, self._base_lrs, strict=True):
            group["lr"] = base * factor

    def _step(self, batch: Batch, plan: HeadPlan | None, rng: torch.Generator) -> str:
        with torch.autocast(self.model.device.type, torch.bfloat16):
            hidden = self.model.model(batch.ids, use_cache=False, head_plan=plan).last_hidden_state
            is_answer = batch.answer >= 0
            answer_loss, accuracy = self._loss(hidden[is_answer], batch.targets[is_answer])
            places = (batch.targets != IGNORE).nonzero()
            drawn = places[
                torch.randint(len(places), (LM_POSITIONS,), generator=rng).to(places.device)
            ].unbind(1)
            lm_loss, _ = self._loss(hidden[drawn], batch.targets[drawn])
        (answer_loss + LM_WEIGHT * lm_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self._optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return f"answer loss {answer_loss.item():.3f} accuracy {accuracy:.3f} text loss {lm_loss.item():.3f}"

    def _loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        logits = self.model.lm_head(hidden).float()
        return F.cross_entropy(logits, targets), (logits.argmax(-1) == targets).float().mean().item()

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            "progress": vars(self._progress),
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._checkpoint)

    def _load(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True, map_location=self.model.device)
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self._progress = Progress(**state["progress"])


def draw_plan(
    stage: Stage, rng: torch.Generator, plans: tuple[Plan, ...] = RETRIEVAL_PLANS
) -> HeadPlan | None:
    """The head plan of the next batch: None (all heads see everything) or one of ``plans``."""
    if float(torch.rand((), generator=rng)) >= stage.masked:
        return None
    chosen = int(torch.randint(len(plans), (), generator=rng))
    return HeadPlan(plans[chosen], stage.sink, stage.recent)


def _build_optimisers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or ".layers." not in name]
    return [
        torch.optim.Muon(
            matrices, lr=MUON_LR, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.01),
    ]
