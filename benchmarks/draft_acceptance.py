"""Measure how many tokens a verified step adds where a given text plays the output.

Drafters are driven as an engine drives them, and a draft is accepted if it is what the text goes on with, as
a step accepts what its sampling returns. Texts: a Python file after each of eight commits of this repository,
with the file before as the prompt; paragraphs quoted from README and two pages, with the page as the prompt;
the JSON results of benchmarks; and the second half of the pages, with the first as the prompt. Tokens are
those of a byte-level BPE that is trained on docs/ and hpu_duo/.

    python benchmarks/draft_acceptance.py [--drafts 8] [--commit HEAD] [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from hpu_duo.config.speculation import SpeculativeConfig
from hpu_duo.drafting import Drafter, make_drafter
from hpu_duo.request import Request, TokenLimits
from hpu_duo.sampling import SamplingParams

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/prefix-cache.md", "docs/kv-budget.md")
RESULTS = ("benchmarks/results/cpu.json", "benchmarks/results/gpu-computed.json")
NUM_COMMITS, VOCAB_SIZE = 8, 16_384


@dataclass
class Found:
    """Counts over some texts; ``cpu_s`` of the drafter."""

    texts: str
    method: str
    num_tokens: int = 0
    num_steps: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    cpu_s: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the text by steps that it took."""
        return self.num_tokens / max(1, self.num_steps)


def git(*arguments: str) -> str:
    """Return the output of a git command in this repository."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def edits(commit: str) -> Iterator[tuple[str, str]]:
    """Yield files before and after the last commits that changed one of 2,000 to 30,000 characters."""
    found = 0
    for each in git("log", "--no-merges", "--format=%h", "-200", commit).split():
        for path in git("diff", "--name-only", "--diff-filter=M", f"{each}~", each).split():
            before = git("show", f"{each}~:{path}") if path.endswith(".py") else ""
            if 2000 < len(before) < 30_000:
                yield before, git("show", f"{each}:{path}")
                found += 1
                break
        if found == NUM_COMMITS:
            return


def texts(commit: str) -> dict[str, list[tuple[str, str]]]:
    """Return prompts and outputs by kind."""
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in PAGES]
    long = [[part for part in page.split("\n\n") if len(part) > 300][:6] for page in pages]
    results = [(ROOT / name).read_text(encoding="utf-8")[:20_000] for name in RESULTS]
    return {
        "edits": list(edits(commit)),
        "quotes": [(page, "\n\n".join(parts)) for page, parts in zip(pages, long)],
        "JSON": [(text[:300], text[300:]) for text in results],
        "prose": [(page[: len(page) // 2], page[len(page) // 2 :]) for page in pages],
    }


def tokenizer() -> Tokenizer:
    """Train the tokenizer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    files = [str(path) for path in sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("hpu_duo/**/*.py")])]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train(
        files, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def play(drafter: Drafter, prompt: list[int], output: list[int], num_drafts: int, found: Found) -> None:
    """Let a text play the output of a request."""
    params = SamplingParams(max_tokens=len(output))
    request = Request("text", prompt, params, TokenLimits(len(prompt) + len(output) + 1))
    drafter.begin(request)
    drafter.extend(request, request.prompt_token_ids)
    drafts: list[int] = []
    while (done := request.num_output_tokens) < len(output):
        right = next((n for n, token in enumerate(drafts) if output[done + n] != token), len(drafts))
        for token in output[done : done + right + 1]:
            request.append(token)
        found.num_proposed += len(drafts)
        found.num_accepted += right
        found.num_steps += 1
        began = time.process_time()
        drafter.extend(request, request.output_token_ids[done:])
        most = min(num_drafts, len(output) - request.num_output_tokens - 1)
        drafts = [int(token) for token in drafter.propose(request, most)] if most > 0 else []
        found.cpu_s += time.process_time() - began
    found.num_tokens += len(output)
    drafter.end(request)


def main() -> None:
    """Print a row for each kind of text and each drafter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    configs = (
        SpeculativeConfig(num_speculative_tokens=asked.drafts),
        SpeculativeConfig(
            method="ngram", num_speculative_tokens=asked.drafts, prompt_lookup_min=1, prompt_lookup_max=4
        ),
    )
    encoder, rows = tokenizer(), []
    for kind, pairs in texts(asked.commit).items():
        for config in configs:
            found, drafter = Found(kind, config.method), make_drafter(config)
            for prompt, output in pairs:
                play(drafter, encoder.encode(prompt).ids, encoder.encode(output).ids, asked.drafts, found)
            rows.append(found)
    if asked.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for row in rows:
        share = row.num_accepted / max(1, row.num_proposed)
        print(
            f"{row.texts:8} {row.method:8} {row.tokens_per_step:5.2f} tokens a step, "
            f"{share:.2f} of drafts accepted, {1e6 * row.cpu_s / row.num_steps:.0f} us a step"
        )


if __name__ == "__main__":
    main()
