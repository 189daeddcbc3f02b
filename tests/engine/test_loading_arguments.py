"""Arguments of transformers' from_pretrained and vLLM's LLM in ours."""

from typing import Any

import pytest
import torch

from hpu_duo import HPUDuoModel
from hpu_duo.modeling.loading import LoadingArguments
from tests.engine.tiny import Tiny

REFUSED = {
    "attn_implementation": ("flash_attention_2", "set attention to 'auto'"),
    "load_in_8bit": (True, "not quantised at load: choose dtype"),
    "quantization_config": ({"bits": 4}, "choose dtype"),
    "gguf_file": ("a.gguf", "checkpoint that it was made from"),
    "gpu_memory_utilization": (0.9, "set device_memory_utilization"),
    "use_safetensors": (False, "True or left out"),
    "device_map": ("balanced", "one device: set device, or tensor_parallel_size"),
    "token": (3, "a text, True or False"),
    "local_files_only": ("yes", "True or False"),
    "cache_dir": (3, "a directory"),
    "config": ({"hidden_size": 64}, "an EngineConfig, got dict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_with_ours(name: str) -> None:
    value, ours = REFUSED[name]
    with pytest.raises(ValueError, match=rf"{name}.*{ours}"):
        HPUDuoModel.from_pretrained("nowhere", **{name: value})


def test_an_argument_that_nobody_has_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'spartsity'; did you mean 'sparsity'"):
        HPUDuoModel.from_pretrained("nowhere", spartsity=0.5)


@pytest.mark.parametrize(
    ("device_map", "device", "found"),
    [
        (None, "cpu", "cpu"),
        ("auto", "auto", "auto"),
        ("cpu", "auto", "cpu"),
        ("cuda:0", "cuda:0", "cuda:0"),
        ({"": "cpu"}, "auto", "cpu"),
        (torch.device("cpu"), "cpu", torch.device("cpu")),
    ],
)
def test_a_device_map_is_one_device(device_map: Any, device: Any, found: Any) -> None:
    read = LoadingArguments.read({"device_map": device_map, "device": device})
    assert read.settings["device"] == found


@pytest.mark.parametrize("device_map", [{"": 0, "lm_head": "cpu"}, 0, "sequential"])
def test_a_device_map_of_several_devices_is_refused(device_map: Any) -> None:
    with pytest.raises(ValueError, match="expected device_map 'auto' or one device"):
        LoadingArguments.read({"device_map": device_map})


def test_no_quantization_in_vllm_is_auto_here() -> None:
    assert LoadingArguments.read({"quantization": None}).settings == {}
    with pytest.raises(ValueError, match=r"expected quantization to be one of auto, .*, got 'marlin'"):
        HPUDuoModel.from_pretrained("nowhere", quantization="marlin")


def test_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="got both: 'cpu' and 'cuda'"):
        LoadingArguments.read({"device_map": "cuda", "device": "cpu"})


def test_a_call_written_for_transformers_loads_the_same_model(tiny: Tiny) -> None:
    asked = {"device_map": "auto", "low_cpu_mem_usage": True, "token": None, "load_in_8bit": False}
    written = tiny.load(dtype="fp32", use_safetensors=True, **asked)
    assert torch.equal(
        written.generate([[5, 6]], max_new_tokens=4), tiny.load().generate([[5, 6]], max_new_tokens=4)
    )
