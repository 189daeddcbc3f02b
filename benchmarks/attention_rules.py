"""Prompts and decodes of heads with an attention rule beside full attention, side by side in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.attention_rules --out benchmarks/results/attention-rules.md

A random model reads one prompt of ``--context`` tokens and decodes, under each rule. Engines take turns, one
whole run each, ``--rounds`` times; a row has the median CPU time of the prompt and of a decode, their ratios
to full attention, and the tiles of the prompt that the rule leaves.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from hpu_duo import HPUDuoModel
from hpu_duo.sampling import SamplingParams

VOCAB = 512
FULL = "full"
RULES = (
    FULL,
    "sink_band:sink=4,band=512",
    "dilated:width=512,dilation=2",
    "strided:stride=128",
    "strided:stride=2048",
    "fixed:stride=1024,summary=128",
    "top_blocks:blocks=16",
    "top_blocks:blocks=32",
)


@dataclass
class Subject:
    """An engine under a rule, and what its runs took.

    Attributes:
        prefill_s, decode_s: CPU seconds of the prompt, and of each decode, a number for each round.
        tiles: share of those of the prompt that the rule leaves.
    """

    rule: str
    model: HPUDuoModel
    prefill_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    tiles: str = ""

    @classmethod
    def load(cls, path: Path, rule: str, dtype: str, args: argparse.Namespace) -> Subject:
        """Load the model."""
        model = HPUDuoModel.from_pretrained(
            path,
            dtype=dtype,
            attention=args.attention,
            max_num_seqs=1,
            max_num_batched_tokens=args.chunk,
            max_model_len=args.context + args.decodes + 1,
            enable_prefix_caching=False,
            attention_rule=None if rule == FULL else rule,
        )
        return cls(rule, model)

    def run(self, args: argparse.Namespace) -> None:
        """Read a prompt, and decode."""
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(3, VOCAB, (args.context,), generator=generator).tolist()
        engine = self.model.engine
        params = SamplingParams(temperature=0, max_tokens=args.decodes + 1, ignore_eos=True)
        engine.add_request(prompt, params)
        begin = time.process_time()
        for _ in range(-(-args.context // args.chunk)):
            engine.step()
        middle = time.process_time()
        # Before decodes, which see all tokens where prompts choose.
        self.tiles = self.tiles or self._tiles_left()
        for _ in range(args.decodes):
            engine.step()
        self.prefill_s.append(middle - begin)
        self.decode_s.append((time.process_time() - middle) / args.decodes)

    def _tiles_left(self) -> str:
        """Share of tiles that the rule leaves."""
        stats = self.model.stats().attention_rules
        return "1" if not stats else f"{stats[0].tiles.num_tiles / stats[0].tiles.num_dense_tiles:.2f}"


def measure(path: Path, dtype: str, args: argparse.Namespace) -> list[str]:
    """Run all, and return a table."""
    subjects = [Subject.load(path, rule, dtype, args) for rule in (FULL, *args.rules)]
    for _ in range(args.rounds):
        for subject in subjects:
            subject.run(args)
    full = subjects[0]
    lines = [
        f"{dtype}:",
        "",
        "| rule | tiles left | prompt, s | of full | decode, ms | of full |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for subject in subjects:
        prefill, decode = (statistics.median(x) for x in (subject.prefill_s, subject.decode_s))
        of_prefill = statistics.median(a / b for a, b in zip(subject.prefill_s, full.prefill_s))
        of_decode = statistics.median(a / b for a, b in zip(subject.decode_s, full.decode_s))
        lines.append(
            f"| `{subject.rule}` | {subject.tiles} | {prefill:.2f} | {of_prefill:.2f} | "
            f"{1e3 * decode:.1f} | {of_decode:.2f} |"
        )
    return [*lines, ""]


def main() -> None:
    """Write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--decodes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--rules", nargs="+", default=RULES[1:], help="beside full attention")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2 * args.context,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        LlamaForCausalLM(config).save_pretrained(directory)
        lines = [line for dtype in args.dtypes for line in measure(Path(directory), dtype, args)]
    text = "\n".join(
        [
            "# Attention rules beside full attention",
            "",
            f"{args.context} tokens in chunks of {args.chunk}, then {args.decodes} decodes; 2 layers of",
            f"8 heads, 2 KV heads of 64, `{args.attention}`; medians of {args.rounds} rounds side by side,",
            "CPU time of one thread.",
            f"{platform.processor() or platform.machine()}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, {date.today()}.",
            "",
            *lines,
        ]
    )
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
