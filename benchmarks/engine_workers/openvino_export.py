"""Export a checkpoint to OpenVINO's format, once: ``python openvino_export.py CHECKPOINT FOLDER``.

The pipeline wants a tokenizer even for token ids, so a byte-level one is trained on one sentence; it is
never used. With AMX and one thread OpenVINO 2026.4 divides by zero in its fused MLP (its issue 28550), so a
bound that never binds stands where the fusion would look.
"""

from __future__ import annotations

import sys
from pathlib import Path

import openvino
import openvino_tokenizers
from openvino import opset13
from optimum.intel import OVModelForCausalLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def export(model: Path, target: Path) -> None:
    """Write the checkpoint in OpenVINO's format, with weights in 16 bits."""
    OVModelForCausalLM.from_pretrained(model, export=True, load_in_8bit=False, compile=False).save_pretrained(
        target
    )
    _keep_mlps_apart(target / "openvino_model.xml")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog"],
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "</s>"],
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    encoder, decoder = openvino_tokenizers.convert_tokenizer(fast, with_detokenizer=True)
    openvino.save_model(encoder, target / "openvino_tokenizer.xml")
    openvino.save_model(decoder, target / "openvino_detokenizer.xml")


def _keep_mlps_apart(path: Path) -> None:
    model = openvino.Core().read_model(path)
    for node in model.get_ops():
        if node.get_type_name() == "Swish":
            targets = node.output(0).get_target_inputs()
            bounded = opset13.clamp(node.output(0), -1e30, 1e30)
            for target in targets:
                target.replace_source_output(bounded.output(0))
    openvino.save_model(model, path.with_suffix(".new.xml"), compress_to_fp16=False)
    del model
    for suffix in (".xml", ".bin"):
        path.with_suffix(f".new{suffix}").replace(path.with_suffix(suffix))


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
