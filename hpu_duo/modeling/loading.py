"""Loading of transformers checkpoints from directories, and the arguments of transformers and vLLM for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, getdoc, signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from hpu_duo.config.engine import SETTINGS, EngineConfig, nearest
from hpu_duo.config.overrides import EngineOverrides, LoadOverrides
from hpu_duo.modeling.attention import NAME, attention
from hpu_duo.modeling.config_checks import (
    NO_REMOTE_CODE,
    RANGES,
    refusal,
    refuse_adapter,
    refuse_remote_code,
)
from hpu_duo.modeling.config_file import CONFIG_FILE, FILE_ERRORS, check_causal, read_config_file
from hpu_duo.modeling.experts import adapt_loops, register_experts
from hpu_duo.modeling.hub import HubAccess
from hpu_duo.modeling.latents import latent_projections
from hpu_duo.modeling.probe import mark
from hpu_duo.modeling.quantised.checkpoint import StoredTensor, quantisation_of, stored_tensors
from hpu_duo.modeling.quantised.linear import DEQUANTISED, WeightExecution
from hpu_duo.modeling.quantised.state import StoredCodes, codes_in, fill, linears_of, make_room
from hpu_duo.modeling.transformers_internals import EXPERTS, causal_model_class

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mark)

_WEIGHT_ERRORS = (*FILE_ERRORS, RuntimeError, ImportError, SafetensorError)


def is_transformers_5() -> bool:
    """Whether transformers is 5 or later."""
    return int(transformers.__version__.split(".")[0]) >= 5


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def resolve_dtype(dtype: str | torch.dtype, config: Any, device_type: str = "cpu") -> torch.dtype:
    """The dtype of weights and caches; "auto" is the checkpoint's own, and on an HPU always bfloat16.

    Short names are valid too: bf16, fp16, half, fp32, float.

    A Gaudi computes float32 at a fraction of its speed, and float16 at the speed of bfloat16 with less range.

    Raises:
        ValueError: a name or type that is not one of ``DTYPES``, be it the checkpoint's.
    """
    if isinstance(dtype, str) and dtype == "auto":
        # The default of transformers is float32 as well.
        own = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or "float32"
        name = str(own).removeprefix("torch.")
        if name not in DTYPES:
            raise ValueError(
                f"expected a checkpoint of dtype {', '.join(DTYPES)}, got {name}; "
                "name the dtype to serve it in instead of 'auto'"
            )
        return torch.bfloat16 if device_type == "hpu" else DTYPES[name]
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        if (name := _ALIASES.get(name, name)) in DTYPES:
            return DTYPES[name]
    raise ValueError(f"expected dtype 'auto' or one of {', '.join(DTYPES)}, got {dtype!r}")


def choose_dtype(dtype: str | torch.dtype, torch_dtype: str | torch.dtype | None = None) -> str | torch.dtype:
    """Return the dtype of two names of one argument; ValueError if they differ."""
    if torch_dtype is None:
        return dtype
    if dtype not in ("auto", torch_dtype):
        raise ValueError(f"expected dtype or torch_dtype, got both: {dtype!r} and {torch_dtype!r}")
    return torch_dtype


def read_config(path: str | Path, *, needs_weights: bool = True) -> Any:
    """The model's configuration.

    Args:
        needs_weights: raise ValueError for a directory without weights.

    Raises:
        ValueError: the directory, its config.json or its weights are missing, the configuration
            cannot be read, it is not that of a decoder-only language model, its weights are quantised in a
            way that is not read, or there is an adapter.
    """
    directory = checked_directory(path)
    refuse_adapter(directory)
    file = directory / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"expected {CONFIG_FILE} in {directory}, found none")
    if needs_weights and not any(directory.glob("*.safetensors")):
        raise ValueError(f"expected *.safetensors weights in {directory}, found {_other_weights(directory)}")
    config = read_config_file(file)
    check_causal(type(config))
    _check_sizes(file, config.get_text_config())
    return config


def checked_directory(path: str | Path) -> Path:
    """Return the path of a checkpoint; ValueError when it is empty or no directory."""
    # An empty path would be the current directory.
    if not str(path) or not Path(path).is_dir():
        raise ValueError(f"expected a directory with a transformers checkpoint, got {str(path)!r}")
    return Path(path)


def _other_weights(directory: Path) -> str:
    """Name what is there instead of safetensors, and how to convert it."""
    pickled = sorted(path.name for suffix in ("bin", "pt", "pth") for path in directory.glob(f"*.{suffix}"))
    if not pickled:
        return "none"
    return (
        f"{pickled[0]}, which may contain code and is not read; convert it once, if you trust it: "
        f"transformers.AutoModelForCausalLM.from_pretrained({str(directory)!r}, "
        "dtype='auto').save_pretrained(NEW_DIRECTORY), and the same with AutoTokenizer"
    )


def _check_sizes(file: Path, config: Any) -> None:
    """Check that the sizes that every model needs are there, by whatever name the file has them."""
    for name in _SIZES:
        try:
            size = getattr(config, name, 1)
        except RuntimeError as error:
            # transformers refuses to read a number that layers have their own of.
            raise ValueError(
                f"model_type {config.model_type!r} cannot be served: expected one {name} for all layers in "
                f"{file}, got some for single layers"
            ) from error
        if size not in RANGES[name]:
            raise ValueError(f"expected {name} to be {RANGES[name]} in {file}, got {size!r}")


def dtype_option(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The argument of transformers' ``from_pretrained``, by its name in the installed version."""
    # Called torch_dtype up to 4.55; dtype after it, with the old name understood until 5.
    return {"dtype" if is_transformers_5() else "torch_dtype": dtype}


def load_model(
    path: str | Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    execution: WeightExecution = DEQUANTISED,
) -> PreTrainedModel:
    """The model in evaluation mode, with our attention function in place of its own.

    Quantised weights are read one after the other.

    Args:
        execution: which of them stay codes, and whether plain ones become codes.

    Raises:
        ValueError: the weights are unreadable, incomplete, or of other shapes than in the configuration,
            quantised ones are not what the configuration says of them, or the architecture does not use
            transformers' attention interface.
    """
    tensors = stored_tensors(path, dtype)
    if quantisation_of(path) is None and execution.rounding is None:
        model = _loaded(path, config, dtype, AutoModelForCausalLM, path, **NO_REMOTE_CODE)
    else:
        codes = stored_codes(tensors, build_without_weights(path, config, dtype), execution, dtype)
        model = load_state(path, config, dtype, tensors, _refuse_transposed, codes, execution)
    return model.to(device)  # type: ignore[arg-type]


def stored_codes(
    tensors: Mapping[str, StoredTensor],
    whole: PreTrainedModel,
    execution: WeightExecution,
    dtype: torch.dtype,
) -> dict[str, StoredCodes]:
    """Return what is loaded as codes into a model; see ``codes_in``.

    Args:
        tensors: by the names of the model.
        whole: the model on ``meta``.
    """
    # Older versions want all plain tensors at once: theirs are dequantised one after the other as codes are.
    if execution == DEQUANTISED and is_transformers_5():
        return {}
    head, text_config = whole.get_output_embeddings(), whole.config.get_text_config()
    linears = linears_of(whole, head, bool(getattr(text_config, "tie_word_embeddings", False)))
    for name in latent_projections(whole):
        linears.pop(name, None)
    return codes_in(tensors, linears, execution, dtype, head)


def _refuse_transposed(model: PreTrainedModel) -> None:
    """Raise ValueError for layers whose weights are ``[K, N]``: a square one would be read the wrong way."""
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            raise ValueError(f"expected linear layers with quantised weights, got Conv1D {name}")


class Readable(Protocol):
    """A tensor, or an object that reads one lazily by ``[...]``."""

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        """Return it."""
        ...


@dataclass(frozen=True)
class _Watched:
    """A tensor whose errors are kept: transformers reports them by a text of its own."""

    tensor: Readable
    errors: list[ValueError]

    def __getitem__(self, index: Any) -> torch.Tensor:
        try:
            return self.tensor[index]
        except ValueError as error:
            self.errors.append(error)
            raise


def load_state(
    path: str | Path,
    config: Any,
    dtype: torch.dtype,
    state: Mapping[str, Readable],
    fit: Callable[[PreTrainedModel], None] = lambda model: None,
    codes: Mapping[str, StoredCodes] = MappingProxyType({}),
    execution: WeightExecution = DEQUANTISED,
) -> PreTrainedModel:
    """Build the same from tensors, by their names in checkpoints; they are not copied.

    Args:
        state: the tensors, or what reads them, so that none is in memory twice.
        path: of the checkpoint, for error messages.
        fit: sets further sizes of the model, in place, before its weights are loaded.
        codes: what is loaded as codes, by names of ``state``.
        execution: which of them stay codes.

    Raises:
        ValueError: see ``load_model``.
    """
    model_class: Any = causal_model_class(type(config))
    refused: list[ValueError] = []
    # From 5 on transformers itself reads entries by a subscript, one after the other.
    plain = {name: each for name, each in state.items() if name not in codes}
    held: dict[str, Any] = {name: _Watched(each, refused) for name, each in plain.items()}
    if not is_transformers_5():
        held = {name: each[...] for name, each in plain.items()}

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        fit(self)
        make_room(self, codes)

    # transformers builds the model inside its loader. Names are the family's, by which it finds its rules.
    entries = {
        "__init__": build,
        "__module__": model_class.__module__,
        "__qualname__": model_class.__qualname__,
    }
    fitted = type(model_class.__name__, (model_class,), entries)
    try:
        model = _loaded(path, config, dtype, fitted, None, state_dict=held)
    except ValueError as error:
        raise (refused[0] if refused else error) from error
    if refused:
        raise refused[0]
    model.__class__ = model_class
    fill(model, codes, execution, dtype)
    return model


def _loaded(
    path: str | Path, config: Any, dtype: torch.dtype, source: Any, name: str | Path | None, **given: Any
) -> PreTrainedModel:
    """Load a model by transformers, and describe errors."""
    options = {**_build_options(config, dtype), **given, "use_safetensors": True}
    if is_transformers_5():
        # Reported below with both shapes; older versions raise an error that has them.
        options["ignore_mismatched_sizes"] = True
    try:
        loaded: Any = source.from_pretrained(name, config=config, output_loading_info=True, **options)
    except SafetensorError as error:
        raise ValueError(f"expected whole *.safetensors files in {path}, got: {error}") from error
    except _WEIGHT_ERRORS as error:
        raise _refusal(path, config, error) from error
    model, report = loaded
    _check_complete(path, report)
    adapt_loops(model)
    return model.eval().requires_grad_(False)


def build_without_weights(path: str | Path, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The same model on device ``meta``: shapes and code, no values and no memory.

    Raises:
        ValueError: the configuration or the architecture cannot be used.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=False, **_build_options(config, dtype)
            )
    except _WEIGHT_ERRORS as error:
        raise _refusal(path, config, error) from error
    # Some families name the CPU for a parameter.
    return model.to("meta").eval().requires_grad_(False)


def _build_options(config: Any, dtype: torch.dtype) -> dict[str, Any]:
    options: dict[str, Any] = {**dtype_option(dtype), "attn_implementation": NAME}
    if hasattr(config, EXPERTS) and (experts := register_experts()) is not None:
        options["experts_implementation"] = experts
    return options


def _refusal(path: str | Path, config: Any, error: Exception) -> ValueError:
    if isinstance(error, KeyError) and error.args == (NAME,):
        return ValueError(
            f"{config.model_type!r} cannot be served: transformers {transformers.__version__} gives it "
            "attention classes of its own instead of its attention interface"
        )
    return refusal(f"cannot load the model in {path}", error)


def _check_complete(path: str | Path, report: Any) -> None:
    mismatched = sorted(
        f"{key} of shape {list(expected)}, got {list(got)}"
        for key, got, expected in report["mismatched_keys"]
    )
    missing = sorted(f"{key}, got none" for key in report["missing_keys"])
    if wrong := mismatched + missing:
        shown = "; ".join(wrong[:5]) + ("; ..." if len(wrong) > 5 else "")
        raise ValueError(f"the weights in {path} do not fit the configuration: expected {shown}")


def read_generation_config(path: str | Path, config: Any) -> GenerationConfig:
    """generation_config.json, or the special tokens of config.json if there is none.

    Raises:
        ValueError: the file cannot be read.
    """
    if not (Path(path) / "generation_config.json").is_file():
        return GenerationConfig.from_model_config(config)
    try:
        return GenerationConfig.from_pretrained(path, **NO_REMOTE_CODE)
    except FILE_ERRORS as error:
        raise refusal(f"cannot read {Path(path) / 'generation_config.json'}", error) from error


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer, or None when it has none.

    Raises:
        ValueError: it has one that cannot be read.
    """
    if not any((Path(path) / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(path, **NO_REMOTE_CODE)
    except (*FILE_ERRORS, ImportError) as error:
        raise refusal(f"cannot read the tokenizer in {path}", error) from error


_QUANTISED = (
    "plain weights are not quantised at load: choose dtype, or a checkpoint that is quantised already, "
    "which is read as its files say"
)
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
    "gguf_file": (
        "GGUF files are not read: load the checkpoint that it was made from, or save plain weights with "
        "transformers once (from_pretrained with gguf_file, then save_pretrained)"
    ),
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
    "download_dir": "set cache_dir",
    "tokenizer": _ONE_FILE,
    "enforce_eager": "set graphs='eager'",
    "pipeline_parallel_size": "set tensor_parallel_size",
    "data_parallel_size": "start several servers: hpu-duo serve --replicas",
    "enable_expert_parallel": "set expert_parallel",
    "num_gpu_blocks_override": "set num_blocks",
    "kv_cache_memory_bytes": "set kv_cache_bytes",
    "enable_lora": "adapters are not served: merge them into a checkpoint",
    "max_seq_len_to_capture": "set max_captured_tokens",
    "compilation_config": "set graphs and buckets",
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
        if settings.get("quantization", "") is None:  # vLLM's default
            del settings["quantization"]
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
