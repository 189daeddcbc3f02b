"""H2O's claim on a data set with heavy hitters, by a dense oracle: who keeps what is asked for often.

    python benchmarks/heavy_hitters.py --out benchmarks/results/heavy-hitters.md
    python benchmarks/heavy_hitters.py --write heavy-hitters.jsonl

Documents tell a few passkeys at their beginning, ask for and answer each of them several times, and end with
a tail without any (``hpu_duo.lab.tasks.rehearsed``). The same documents without the repetitions are the
control: there, nothing says beforehand what will be asked for. The data set is made in seconds and needs no
training: the built-in model answers it.

The oracle keeps all keys and values and masks those that a policy has evicted, so it measures accuracy and
saves nothing. The whole prompt is attended to, then cut to the budget; every later token is decoded, and
after each one is evicted. Heads of one KV group share what they keep.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.lab.eval.interval import wilson
from hpu_duo.lab.tasks.passkeys import PasskeyDocument, question, token_counter
from hpu_duo.lab.tasks.rehearsed import Rehearsals, rehearsed_document

# K KV heads, G query heads of each, T new tokens, L tokens so far, D head size
NAME = "dense_oracle"


@dataclass(frozen=True)
class Policy:
    """Tokens that heads keep besides the one under way.

    Attributes:
        sink, recent: the first and the last tokens.
        heavy: of the others, those with the largest sums of attention weights; None keeps all.
    """

    name: str
    sink: int = 0
    recent: int = 0
    heavy: int | None = 0


def policies(budget: int) -> list[Policy]:
    """Policies that keep ``budget`` tokens."""
    return [
        Policy("H2O", recent=budget - budget // 2, heavy=budget // 2),
        Policy("StreamingLLM, original positions", sink=4, recent=budget - 4),
        Policy("Local", recent=budget),
    ]


class Oracle:
    """Attention of a transformers model with a mask for what has been evicted, by layer and KV head."""

    def __init__(self) -> None:
        self.policy = Policy("full", heavy=None)
        self.kept_KL: dict[int, Tensor] = {}
        self.sums_KL: dict[int, Tensor] = {}
        AttentionInterface.register(NAME, self._attend)

    def begin(self, policy: Policy, of: Oracle | None = None) -> None:
        """Forget everything, or go on from a copy of what was kept."""
        self.policy = policy
        self.kept_KL = {} if of is None else {layer: one.clone() for layer, one in of.kept_KL.items()}
        self.sums_KL = {} if of is None else {layer: one.clone() for layer, one in of.sums_KL.items()}

    def copy(self) -> Oracle:
        """Copy of what is kept now."""
        other = object.__new__(Oracle)
        other.begin(self.policy, self)
        return other

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, scaling: float, **__: Any
    ) -> tuple[Tensor, None]:
        """Source of the policy: H2O, algorithm 1; sums run over queries and over the heads of a group."""
        num_kv, num_all, num_new, layer = k.shape[1], k.shape[2], q.shape[2], module.layer_idx
        q_KGTD = q[0].unflatten(0, (num_kv, -1))
        scores_KGTL = torch.einsum("kgtd,kld->kgtl", q_KGTD, k[0]) * scaling
        kept_KL = torch.ones(num_kv, num_all, dtype=torch.bool)
        if layer in self.kept_KL:
            kept_KL[:, : num_all - num_new] = self.kept_KL[layer]
        at_L = torch.arange(num_all)
        causal_TL = at_L[None] <= at_L[num_all - num_new :, None]
        visible_KTL = causal_TL[None] & kept_KL[:, None]
        weights_KGTL = scores_KGTL.masked_fill(~visible_KTL[:, None], -1e30).softmax(-1)
        sums_KL = weights_KGTL.sum((1, 2))
        if layer in self.sums_KL:
            sums_KL[:, : num_all - num_new] += self.sums_KL[layer]
        self.kept_KL[layer], self.sums_KL[layer] = self._cut(kept_KL, sums_KL), sums_KL
        out_KGTD = torch.einsum("kgtl,kld->kgtd", weights_KGTL, v[0])
        return out_KGTD.flatten(0, 1).transpose(0, 1)[None], None

    def _cut(self, kept_KL: Tensor, sums_KL: Tensor) -> Tensor:
        policy, num_all = self.policy, kept_KL.shape[1]
        if policy.heavy is None:
            return kept_KL
        at_L = torch.arange(num_all)
        always_L = (at_L < policy.sink) | (at_L >= num_all - policy.recent)
        free_KL = kept_KL & ~always_L
        ranked_KL = sums_KL.masked_fill(~free_KL, -1.0).argsort(dim=-1, descending=True, stable=True)
        heavy_KL = torch.zeros_like(kept_KL).scatter_(1, ranked_KL[:, : policy.heavy], True)
        return (always_L & kept_KL) | (free_KL & heavy_KL)


@dataclass(frozen=True)
class Counts:
    """Answers and, of them, those right word for word."""

    num_answers: int
    num_exact: int


class Asker:
    """The built-in model behind the oracle."""

    def __init__(self) -> None:
        self.oracle = Oracle()
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
        model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
        model.set_attn_implementation(NAME)
        self.model = model.eval()

    def ids(self, text: str, is_start: bool = False) -> list[int]:
        """Token ids of a text."""
        return list(self.tokenizer(text, add_special_tokens=is_start)["input_ids"])

    @torch.inference_mode()
    def ask(self, written: PasskeyDocument, policy: Policy) -> Counts:
        """Prefill the document but for its last token, then decode each question with its answer."""
        prompt = self.ids(written.text, is_start=True)
        self.oracle.begin(policy)
        cache = self.model(torch.tensor([prompt[:-1]]), use_cache=True).past_key_values
        start, num_exact = self.oracle.copy(), 0
        for one in written.passkeys:
            asked, answer = [prompt[-1], *self.ids(question(one))], self.ids(one.answer)
            self.oracle.begin(policy, start)
            right = []
            for token, following in zip([*asked, *answer[:-1]], [*asked[1:], *answer], strict=True):
                logits = self.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits
                right.append(int(logits[0, -1].argmax()) == following)
            num_exact += all(right[-len(answer) :])
            # Of the last token of the answer there is nothing to take back.
            cache.crop(-(len(asked) + len(answer) - 1))
        return Counts(len(written.passkeys), num_exact)


def documents(args: argparse.Namespace, num_rehearsals: int, asker: Asker) -> Iterator[PasskeyDocument]:
    """The documents of a run."""
    for seed in range(args.num_documents):
        yield rehearsed_document(
            token_counter(asker.tokenizer),
            args.num_tokens,
            args.num_passkeys,
            args.passkey_words,
            2**41 + seed,
            Rehearsals(num_rehearsals, args.tail),
        )


def measure(args: argparse.Namespace, asker: Asker) -> list[dict[str, Any]]:
    """One row for each policy and budget, with and without rehearsals."""
    rows = []
    for num_rehearsals in (args.rehearsals, 0):
        found = list(documents(args, num_rehearsals, asker))
        wanted = [(1.0, Policy("full attention", heavy=None))]
        wanted += [(share, one) for share in args.budgets for one in policies(int(share * args.num_tokens))]
        for share, policy in wanted:
            began = time.process_time()
            counts = [asker.ask(one, policy) for one in found]
            row = {
                "rehearsals": num_rehearsals,
                "budget": share,
                "policy": policy.name,
                "num_answers": sum(one.num_answers for one in counts),
                "num_exact": sum(one.num_exact for one in counts),
            }
            rows.append(row)
            print(row, f"{time.process_time() - began:.0f} s", flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]], num_rehearsals: int) -> str:
    """Accuracies with their 95 % intervals: one line per budget, one column per policy."""
    own = [row for row in rows if row["rehearsals"] == num_rehearsals]
    names = list(dict.fromkeys(row["policy"] for row in own if row["budget"] < 1))
    lines = ["| share of the tokens kept | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for share in sorted({row["budget"] for row in own} - {1.0}):
        cells = [_cell(row) for row in own if row["budget"] == share]
        lines.append(f"| {share:.0%} | " + " | ".join(cells) + " |")
    full = next(row for row in own if row["budget"] == 1.0)
    return "\n".join([*lines, "", f"Full attention: {_cell(full)}."])


def _cell(row: dict[str, Any]) -> str:
    share = row["num_exact"] / row["num_answers"]
    low, high = wilson(share, row["num_answers"])
    return f"{share:.3f} ({low:.2f} to {high:.2f})"


def report(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> str:
    """The results as a page."""
    num_answers = rows[0]["num_answers"]
    return f"""# Heavy hitters: H2O's claim on a data set made for it

Documents of {args.num_tokens:,} tokens tell {args.num_passkeys} passkeys of {args.passkey_words} words at
their beginning and end with a tail of {args.tail:.0%} that mentions none. All are asked for behind the
document. Exact answers of the built-in model, {num_answers} in each cell, with 95 % intervals, by a dense
oracle in float32: the whole prompt is attended to, then what a policy evicts is masked.

## Each passkey asked and answered {args.rehearsals} times in the document

{table(rows, args.rehearsals)}

## The same documents without these repetitions

{table(rows, 0)}

{date.today()}, torch {torch.__version__}, transformers {transformers.__version__}, one thread of a CPU:
`{args.command}`
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-tokens", type=int, default=2000)
    parser.add_argument("--num-documents", type=int, default=8)
    parser.add_argument("--num-passkeys", type=int, default=4)
    parser.add_argument("--passkey-words", type=int, default=8)
    parser.add_argument("--rehearsals", type=int, default=4)
    parser.add_argument("--tail", type=float, default=0.35)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    parser.add_argument("--out", type=Path, help="page of results")
    parser.add_argument("--write", type=Path, help="write the data set as JSON lines, and measure nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    asker = Asker()
    if args.write is not None:
        with args.write.open("x", encoding="utf-8") as file:
            for one in documents(args, args.rehearsals, asker):
                asked = [{"question": question(key), "answer": key.answer} for key in one.passkeys]
                file.write(json.dumps({"text": one.text, "questions": asked}) + "\n")
        return
    names = ("num_tokens", "num_documents", "num_passkeys", "passkey_words", "rehearsals", "tail", "budgets")
    changed = [name for name in names if getattr(args, name) != parser.get_default(name)]
    values = [f" --{name.replace('_', '-')} {_shown(getattr(args, name))}" for name in changed]
    args.command = "python benchmarks/heavy_hitters.py" + "".join(values)
    text = report(args, measure(args, asker))
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    main()
