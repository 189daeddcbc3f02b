"""Training and evaluation batches: passkey documents with every question asked, as token ids and labels."""

import math
import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from builtin_training.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS
from hpu_duo.lab.tasks.passkeys import TokenCounter, document, question

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """Token ids and, per position, the id to predict there.

    Attributes:
        ids: int64 [B, T].
        targets: int64 [B, T], the next token everywhere, ``IGNORE`` where there is none.
        answer: int64 [B, T], index of the answer that the target belongs to, -1 for all other text.
        num_answers: answers in the batch.
    """

    ids: Tensor
    targets: Tensor
    answer: Tensor
    num_answers: int

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        return Batch(self.ids.to(device), self.targets.to(device), self.answer.to(device), self.num_answers)


@dataclass(frozen=True)
class Task:
    """Sizes of the documents of a batch; ranges are inclusive and drawn per document.

    Attributes:
        num_tokens: T, sequence length in tokens.
        batch_size: B.
        num_passkeys, passkey_words: ranges.
        random_tokens: share of documents whose passkeys are arbitrary tokens instead of words.
        repeats: share of documents that are one random sequence over and over, which teaches plain copying.
    """

    num_tokens: int
    batch_size: int
    num_passkeys: tuple[int, int]
    passkey_words: tuple[int, int]
    random_tokens: float = 0.0
    repeats: float = 0.0


class BatchMaker:
    """Makes the batch of a task from a seed; equal seeds give equal batches."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        self._count: TokenCounter = lambda text: len(self._encode(text))
        vocab = tokenizer.get_vocab()
        self._pad, self._bos, self._eos = (vocab[token] for token in (PAD, BOS, EOS))
        self._word_ids = range(len(SPECIAL_TOKENS), tokenizer.get_vocab_size())

    def make(self, task: Task, seed: int) -> Batch:
        rng = random.Random(seed)
        rows: list[tuple[list[int], list[int]]] = []
        num_answers = 0
        for _ in range(task.batch_size):
            if rng.random() < task.repeats:
                ids, answer = self._repeats(task.num_tokens, rng)
            else:
                ids, answer = self._passkeys(task, rng)
            rows.append((ids, [num_answers + a if a >= 0 else -1 for a in answer]))
            num_answers += max(answer) + 1
        ids_BT, answer_BT = torch.tensor(rows).unbind(1)
        targets_BT = torch.full_like(ids_BT, IGNORE)
        targets_BT[:, :-1] = ids_BT[:, 1:]
        targets_BT[targets_BT == self._pad] = IGNORE
        answer_of_target = torch.full_like(answer_BT, -1)
        answer_of_target[:, :-1] = answer_BT[:, 1:]
        return Batch(ids_BT, targets_BT, answer_of_target, num_answers)

    def _passkeys(self, task: Task, rng: random.Random) -> tuple[list[int], list[int]]:
        num_passkeys = rng.randint(*task.num_passkeys)
        passkey_words = rng.randint(*task.passkey_words)
        # Besides its words, a passkey costs 13 tokens of question, full stop and <eos>, and 11 of needle.
        num_passkeys = min(num_passkeys, (task.num_tokens - 1) // (13 + 11 + 2 + 2 * passkey_words))
        room = task.num_tokens - 1 - num_passkeys * (15 + passkey_words)
        text = document(self._count, room, num_passkeys, passkey_words, seed=rng.getrandbits(32))

        ids = [self._bos, *self._encode(text.text)]
        answer = [-1] * len(ids)
        for index, passkey in enumerate(rng.sample(text.passkeys, num_passkeys)):
            asked, told = self._encode(question(passkey)), [*self._encode(passkey.answer), self._eos]
            ids += asked + told
            answer += [-1] * len(asked) + [index] * len(told)
        if rng.random() < task.random_tokens:
            secret = {
                i for passkey in text.passkeys for word in passkey.words for i in self._encode(" " + word)
            }
            renamed = dict(zip(sorted(secret), rng.sample(self._word_ids, len(secret)), strict=True))
            ids = [renamed.get(i, i) for i in ids]
        padding = task.num_tokens - len(ids)
        return ids + [self._pad] * padding, answer + [-1] * padding

    def _repeats(self, num_tokens: int, rng: random.Random) -> tuple[list[int], list[int]]:
        period = round(math.exp(rng.uniform(math.log(8), math.log(num_tokens // 2))))
        once = rng.sample(self._word_ids, min(period, len(self._word_ids)))
        ids = [self._bos, *(once * (num_tokens // len(once) + 1))][:num_tokens]
        return ids, [-1 if place <= len(once) + 1 else 0 for place in range(num_tokens)]
