"""A decode layer with two kinds of heads has few more operators than one with one kind."""

from itertools import product
from pathlib import Path

import pytest
from transformers import LlamaConfig

from benchmarks.kernel_work import structure_of
from graphs import BatchShape
from hpu_duo.lab.audit import audit_bucket
from tests.tiers import every

MOST_OPERATORS = {"reference": 112, "hpu": 113}
"""Of a layer with one kind of heads."""

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}


def layer_operators(path: Path, attention: str, num_retrieval: int, bucket: str) -> int:
    """Operators of a layer, those outside of layers taken off."""
    totals = []
    for num_layers in (1, 2):
        LlamaConfig(
            **SIZES,
            num_hidden_layers=num_layers,
            vocab_size=1024,
            max_position_embeddings=8192,
            dtype="bfloat16",
        ).save_pretrained(path)
        structure = structure_of(path, attention, num_retrieval, SIZES["num_key_value_heads"], num_layers)
        totals.append(audit_bucket(structure, BatchShape.parse(bucket)).total.num_launches)
    return totals[1] - totals[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "bucket"),
    every(4, product(["hpu", "reference"], ["--u/q1/s0/u64/l1", "--u/q16/s0/u512/l16"])),
)
def test_a_decode_layer_with_two_kinds_has_a_fifth_more_operators_at_most(
    tmp_path: Path, attention: str, bucket: str
) -> None:
    one, two = (layer_operators(tmp_path, attention, number, bucket) for number in (4, 2))
    assert one <= MOST_OPERATORS[attention]
    assert two <= 1.2 * one
