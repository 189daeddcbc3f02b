"""Generate with half of the KV heads streaming: the API on one page.

python examples/generate.py
"""

from transformers import AutoTokenizer, TextStreamer

from hpu_duo import HPUDuoModel
from hpu_duo.builtin import MODEL_DIR, PATTERN_DIR
from hpu_duo.lab.tasks.passkeys import document, question, token_counter

# Any local transformers checkpoint, and the head pattern that was made for it.
# The prompts begin alike, and blocks that they share would hide what streaming heads save.
model = HPUDuoModel.from_pretrained(
    MODEL_DIR, pattern=PATTERN_DIR, sparsity=0.5, max_num_seqs=4, enable_prefix_caching=False
)
tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)

written = document(token_counter(tokenizer), num_tokens=1500, num_passkeys=4, passkey_words=3, seed=0)
prompts = tokenizer([written.text + question(one) for one in written.passkeys])["input_ids"]

# A batch of prompts of any lengths; the arguments are those of transformers' generate.
output = model.generate(prompts, max_new_tokens=5)
for one, prompt, row in zip(written.passkeys, prompts, output):
    print(f"{one.name}:{tokenizer.decode(row[len(prompt) :], skip_special_tokens=True)}")

# One prompt, printed while it is generated.
model.generate(prompts[:1], max_new_tokens=5, streamer=TextStreamer(tokenizer, skip_prompt=True))

stats = model.stats()
held, full = stats.peak_unshared_bytes, stats.peak_full_attention_bytes
if held <= full:
    print(f"KV cache: {held / full:.0%} of full attention")
else:
    print(f"KV cache: {held / 2**20:.1f} MiB in whole blocks and rings (texts too short to compare)")
