"""Arguments of transformers' ``from_pretrained`` and of vLLM's ``LLM``: accepted, or rejected with ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from hpu_duo.config.engine import SETTINGS, EngineConfig, nearest
from hpu_duo.config.overrides import EngineOverrides, LoadOverrides
from hpu_duo.modeling.config_checks import refuse_remote_code
from hpu_duo.modeling.hub import HubAccess
from hpu_duo.modeling.loading import choose_dtype

_QUANTISED = "weights are served in bfloat16, float16 or float32: choose dtype"
_ONE_FILE = "config.json, *.safetensors and the tokenizer of the directory are read"
_FREED = "weights and caches stay on the device: set device_memory_utilization or kv_cache_bytes"
_PLACED = "a model is on one device: set device, or tensor_parallel_size to shard it over several"
_HUB = "it is downloaded with revision, cache_dir, token and local_files_only alone"
_CODE = "code of a checkpoint is never run"
_ATTENTION = "set attention to 'auto', 'reference', 'sdpa', 'triton' or 'hpu'"

_ANSWERS = {
    # transformers
    "attn_implementation": _ATTENTION,
    "use_flash_attention_2": _ATTENTION,
    "experts_implementation": "experts are computed as the device needs it",
    "load_in_8bit": _QUANTISED,
    "load_in_4bit": _QUANTISED,
    "quantization_config": _QUANTISED,
    "gguf_file": "GGUF files are not read: load the checkpoint that it was made from",
    "max_memory": _FREED,
    "offload_folder": _FREED,
    "offload_state_dict": _FREED,
    "offload_buffers": _FREED,
    "tp_plan": "set tensor_parallel_size",
    "tp_size": "set tensor_parallel_size",
    "state_dict": _ONE_FILE,
    "subfolder": f"{_ONE_FILE}: name it in the path",
    "variant": _ONE_FILE,
    "key_mapping": _ONE_FILE,
    "adapter_kwargs": "adapters are not served: merge them into a checkpoint",
    "generation_config": "set model.generation_config after loading, or pass it to generate",
    "force_download": _HUB,
    "proxies": _HUB,
    "mirror": _HUB,
    "use_auth_token": "set token",
    "code_revision": _CODE,
    "use_kernels": _ATTENTION,
    "ignore_mismatched_sizes": "weights have the shapes of config.json",
    "output_loading_info": "there is none: a checkpoint that is not whole is refused",
    "weights_only": "*.safetensors have nothing but weights",
    "from_tf": _ONE_FILE,
    "from_flax": _ONE_FILE,
    # vLLM
    "gpu_memory_utilization": "set device_memory_utilization",
    "quantization": _QUANTISED,
    "kv_cache_dtype": "keys and values have the dtype of the model",
    "download_dir": "set cache_dir",
    "tokenizer": _ONE_FILE,
    "enforce_eager": "set graphs='eager'",
    "cpu_offload_gb": _FREED,
    "swap_space": _FREED,
    "pipeline_parallel_size": "set tensor_parallel_size",
    "data_parallel_size": "start several servers: hpu-duo serve --replicas",
    "enable_expert_parallel": "set expert_parallel",
    "num_gpu_blocks_override": "set num_blocks",
    "kv_cache_memory_bytes": "set kv_cache_bytes",
    "enable_lora": "adapters are not served: merge them into a checkpoint",
    "max_seq_len_to_capture": "set max_captured_tokens",
    "compilation_config": "set graphs and buckets",
    "speculative_config": "there is no speculative decoding",
    "hf_overrides": _ONE_FILE,
    "load_format": _ONE_FILE,
}
"""Messages of rejected arguments, with ours to use instead if there is one."""

_AS_ALWAYS = {
    "low_cpu_mem_usage": (True, False, None),
    "use_safetensors": (True, None),
    "resume_download": (True, False, None),
    "enable_chunked_prefill": (True, None),
}
"""Values without effect."""


@dataclass(frozen=True)
class LoadingArguments:
    """Arguments of ``from_pretrained``, read.

    Attributes:
        settings: those of an ``EngineConfig``, including ``device_map`` and ``torch_dtype``.
        access: to the hub.
        revision: branch, tag or commit of a model of the hub.
    """

    settings: EngineOverrides
    access: HubAccess
    revision: str | None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> LoadingArguments:
        """Read arguments by our names and by those of transformers and vLLM.

        Raises:
            ValueError: an argument that is not supported, naming ours, or a value that is not.
            TypeError: an argument that neither library has.
        """
        refuse_remote_code(given.get("trust_remote_code", False))
        for name, value in given.items():
            _check(name, value)
        token, local = given.get("token"), given.get("local_files_only", False)
        if token is not None and not isinstance(token, str | bool):
            raise ValueError(f"expected token to be a text, True or False, got {type(token).__name__}")
        if not isinstance(local, bool):
            raise ValueError(f"expected local_files_only to be True or False, got {local!r}")
        cache_dir = given.get("cache_dir")
        if cache_dir is not None and not isinstance(cache_dir, str | os.PathLike):
            raise ValueError(f"expected cache_dir to be a directory, got {cache_dir!r}")
        access = HubAccess(None if cache_dir is None else Path(cache_dir), token, local)
        settings: dict[str, Any] = {name: value for name, value in given.items() if name in SETTINGS}
        device = _placed(given.get("device_map"), settings.get("device", "auto"))
        dtype = choose_dtype(settings.get("dtype", "auto"), given.get("torch_dtype"))
        settings |= {name: value for name, value in (("device", device), ("dtype", dtype)) if value != "auto"}
        return cls(cast(EngineOverrides, settings), access, given.get("revision"))

    def config(self, path: str | Path, base: EngineConfig | None) -> EngineConfig:
        """Return the settings, and for all others those of ``base``, for the model of a path.

        Raises:
            ValueError: a value is out of range or does not fit the others, or ``base`` is something else.
        """
        if base is None:
            return EngineConfig.of(path, **self.settings)
        if not isinstance(base, EngineConfig):
            raise ValueError(f"expected config to be an EngineConfig, got {type(base).__name__}: {_ONE_FILE}")
        config = base.override(**self.settings)
        return replace(config, model=replace(config.model, path=path))


def _check(name: str, value: Any) -> None:
    if name in LoadOverrides.__annotations__:
        return
    if name in _AS_ALWAYS:
        if value not in _AS_ALWAYS[name]:
            raise ValueError(f"expected {name} to be {_AS_ALWAYS[name][0]} or left out, got {value!r}")
    elif name not in _ANSWERS:
        question = nearest(name, LoadOverrides.__annotations__)
        raise TypeError(f"from_pretrained() got an unexpected keyword argument {name!r}{question}")
    elif value is not None and value is not False:
        raise ValueError(f"{name} is not an argument here: {_ANSWERS[name]}")


def _placed(device_map: Any, device: str | torch.device) -> str | torch.device:
    """Return the device that both arguments agree on."""
    if isinstance(device_map, Mapping) and list(device_map) == [""]:
        device_map = device_map[""]
    if device_map is None or device_map == "auto":
        return device
    if not isinstance(device_map, str | torch.device) or str(device_map).startswith(
        ("balanced", "sequential", "disk", "meta")
    ):
        raise ValueError(f"expected device_map 'auto' or one device, got {device_map!r}: {_PLACED}")
    if str(device) not in ("auto", str(device_map)):
        raise ValueError(f"expected device or device_map, got both: {device!r} and {device_map!r}")
    return device_map


Function = TypeVar("Function", bound=Callable[..., Any])
_OF_LOADING = {"torch_dtype": None, "revision": None, "trust_remote_code": False}


def described(function: Function) -> Function:
    """Set the signature and texts of a function with ``LoadOverrides``, for ``help``.

    Type checkers read the annotation; this is what ``help`` and ``inspect.signature`` show.
    """
    defaults = {**{name: setting.default for name, setting in SETTINGS.items()}, **_OF_LOADING}
    shown = signature(function)
    named = [each for each in shown.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    annotations = LoadOverrides.__annotations__
    for name, default in defaults.items():
        kind = getattr(annotations[name], "__forward_arg__", annotations[name])
        named.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    function.__signature__ = shown.replace(parameters=named)  # type: ignore[attr-defined]
    lines = [f"    {name}: {setting.option.help}" for name, setting in SETTINGS.items()]
    function.__doc__ = "\n".join([getdoc(function) or "", "", "Settings:", *lines])
    return function
