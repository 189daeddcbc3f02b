"""Read a document once, ask it several questions, and keep it in a file for the next time.

python examples/document_questions.py
"""

import tempfile
import time
from pathlib import Path

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.lab.tasks.passkeys import document, question, token_counter

model = HPUDuoModel.from_pretrained(MODEL_DIR, pattern=PATTERN_DIR, sparsity=0.5, num_prefix_snapshots=2)
assert model.tokenizer is not None
written = document(token_counter(model.tokenizer), num_tokens=1500, num_passkeys=4, passkey_words=3, seed=0)
questions = [question(one) for one in written.passkeys]

with tempfile.TemporaryDirectory() as directory:
    began = time.perf_counter()
    with model.prefill(written.text) as context:
        print(f"read {len(context.token_ids)} tokens in {time.perf_counter() - began:.2f} s")
        # Texts behind a context get texts; the document is not computed again.
        answers = model.generate(questions, context=context, max_new_tokens=5)
        for one, answer in zip(written.passkeys, answers):
            print(f"{one.name}:{answer.removesuffix('<eos>')}")
        context.save(Path(directory) / "document")

    # Another process with the same model would load it like this.
    began = time.perf_counter()
    with model.load_context(Path(directory) / "document") as context:
        print(f"loaded it in {time.perf_counter() - began:.2f} s")
        assert model.generate(questions, context=context, max_new_tokens=5) == answers
