"""Memory and answers with streaming heads, at several sparsities.

python examples/streaming_heads.py

The built-in model is asked for every passkey of one document. Its pattern knows which heads can find
them, so answers stay right while memory shrinks, until retrieval heads themselves begin to stream.
"""

from typing import Annotated

import typer

from hpu_duo import HPUDuoModel, SamplingParams
from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.lab.eval.interval import wilson
from hpu_duo.lab.tasks.passkeys import Passkey, document, question, token_counter

SPARSITIES = (0.0, 0.25, 0.5, 0.75, 1.0)


def main(
    num_tokens: Annotated[int, typer.Option(help="Length of the document.")] = 4000,
    num_passkeys: Annotated[int, typer.Option(help="Passkeys to hide and to ask for.")] = 4,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = 32,
) -> None:
    """Print one line per sparsity: bytes as if no question shared the document's blocks."""
    print("streaming heads   KV cache held   of full attention   passkeys found (95 % interval)")
    for sparsity in SPARSITIES:
        model = HPUDuoModel.from_pretrained(
            MODEL_DIR,
            pattern=PATTERN_DIR,
            sparsity=sparsity,
            max_num_seqs=num_passkeys,
            block_size=block_size,
        )
        num_right = ask(model, num_tokens, num_passkeys)
        stats = model.stats()
        held, full = stats.peak_unshared_bytes, stats.peak_full_attention_bytes
        low, high = wilson(num_right / num_passkeys, num_passkeys)
        print(
            f"{sparsity:15.0%} {held / 2**20:11.1f} MiB {held / full:19.1%} "
            f"{num_right:11d} of {num_passkeys} ({low:.0%} to {high:.0%})",
            flush=True,
        )


def ask(model: HPUDuoModel, num_tokens: int, num_passkeys: int) -> int:
    """Count the passkeys of a document that the model finds, all asked for in one batch."""
    tokenizer = model.tokenizer
    assert tokenizer is not None, "the built-in model has a tokenizer"
    written = document(token_counter(tokenizer), num_tokens, num_passkeys, passkey_words=4, seed=0)
    prompts = [tokenizer(written.text + question(one))["input_ids"] for one in written.passkeys]
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    answers = model.engine.generate(prompts, greedy)
    return sum(_is_right(one, samples[0].text) for one, samples in zip(written.passkeys, answers))


def _is_right(one: Passkey, text: str) -> bool:
    return text.strip() == one.answer.strip()


if __name__ == "__main__":
    typer.run(main)
