"""Model sizes and configurations that the tests of this folder share."""

from typing import Any

from hypothesis import strategies as st

from hpu_duo.planning import AttentionSize, Experts, ModelSize

LLAMA_3_1_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def tiny(num_layers: int = 2, window: int | None = None, **changes: Any) -> ModelSize:
    """A model of a few thousand parameters whose every second layer may have a window."""
    layers = tuple(
        AttentionSize(num_heads=4, num_kv_heads=2, head_dim=8, window=window if index % 2 else None)
        for index in range(num_layers)
    )
    sizes: dict[str, Any] = {
        "name": "tiny",
        "layers": layers,
        "hidden_size": 32,
        "vocab_size": 96,
        "matrix_params": 7000,
        "other_params": 3200,
        "max_positions": 100_000,
    }
    return ModelSize(**{**sizes, **changes})


@st.composite
def models(draw: st.DrawFn) -> ModelSize:
    """Models of up to five layers, some with windows, some with experts."""
    layers = []
    for _ in range(draw(st.integers(1, 5))):
        num_kv_heads = draw(st.sampled_from((1, 2, 4, 8)))
        window = draw(st.none() | st.integers(1, 3000))
        group = draw(st.integers(1, 4))
        layers.append(
            AttentionSize(group * num_kv_heads, num_kv_heads, draw(st.sampled_from((8, 64))), window)
        )
    experts = draw(
        st.just(Experts())
        | st.builds(
            Experts, num_params=st.integers(1, 10**7), num_experts=st.just(8), num_per_token=st.integers(1, 8)
        )
    )
    return tiny(layers=tuple(layers), matrix_params=draw(st.integers(1, 10**8)), experts=experts)
