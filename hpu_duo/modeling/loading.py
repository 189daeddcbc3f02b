"""Loading of transformers checkpoints from directories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

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

from hpu_duo.modeling.attention import NAME, attention
from hpu_duo.modeling.config_checks import (
    CONFIG_FILE,
    FILE_ERRORS,
    NO_REMOTE_CODE,
    RANGES,
    read_config_file,
    refusal,
    refuse_adapter,
)
from hpu_duo.modeling.experts import register_experts
from hpu_duo.modeling.probe import mark
from hpu_duo.modeling.transformers_internals import EXPERTS, causal_model_class

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mark)

_WEIGHT_ERRORS = (*FILE_ERRORS, RuntimeError, ImportError, SafetensorError)

_IS_5 = int(transformers.__version__.split(".")[0]) >= 5

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


def dtype_note(asked: str | torch.dtype, config: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """A sentence for the user if "auto" has become another dtype than the checkpoint's."""
    if asked != "auto" or dtype == resolve_dtype(asked, config):
        return ()
    own = str(resolve_dtype(asked, config)).removeprefix("torch.")
    return (
        f"the checkpoint is in {own} and is served in bfloat16, as an HPU computes: dtype={own!r} keeps it",
    )


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
            cannot be read, it is not that of a decoder-only language model, its weights are quantised, or
            there is an adapter.
    """
    directory = checked_directory(path)
    refuse_adapter(directory)
    file = directory / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"expected {CONFIG_FILE} in {directory}, found none")
    if needs_weights and not any(directory.glob("*.safetensors")):
        raise ValueError(f"expected *.safetensors weights in {directory}, found {_other_weights(directory)}")
    config = read_config_file(file)
    if causal_model_class(config) is None:
        raise ValueError(
            f"model_type {config.model_type!r} has no causal language model in transformers "
            f"{transformers.__version__}"
        )
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
        size = getattr(config, name, 1)
        if size not in RANGES[name]:
            raise ValueError(f"expected {name} to be {RANGES[name]} in {file}, got {size!r}")


def dtype_option(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The argument of transformers' ``from_pretrained``, by its name in the installed version."""
    # Called torch_dtype up to 4.55; dtype after it, with the old name understood until 5.
    return {"dtype" if _IS_5 else "torch_dtype": dtype}


def load_model(path: str | Path, config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model in evaluation mode, with our attention function in place of its own.

    Raises:
        ValueError: the weights are unreadable, incomplete, or of other shapes than in the configuration, or
            the architecture does not use transformers' attention interface.
    """
    model = _loaded(path, config, dtype, AutoModelForCausalLM, path, **NO_REMOTE_CODE)
    return model.to(device)  # type: ignore[arg-type]


class Readable(Protocol):
    """A tensor, or an object that reads one lazily by ``[...]``."""

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        """Return it."""
        ...


def load_state(
    path: str | Path,
    config: Any,
    dtype: torch.dtype,
    state: Mapping[str, Readable],
    fit: Callable[[PreTrainedModel], None],
) -> PreTrainedModel:
    """Build the same from tensors, by their names in checkpoints; they are not copied.

    Args:
        state: the tensors, or what reads them, so that none is in memory twice.
        path: of the checkpoint, for error messages.
        fit: sets further sizes of the model, in place, before its weights are loaded.

    Raises:
        ValueError: see ``load_model``.
    """
    model_class: Any = causal_model_class(config)
    # From 5 on transformers itself reads entries by a subscript, one after the other.
    held = dict(state) if _IS_5 else {name: each[...] for name, each in state.items()}

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        fit(self)

    # transformers builds the model inside its loader. Names are the family's, by which it finds its rules.
    entries = {
        "__init__": build,
        "__module__": model_class.__module__,
        "__qualname__": model_class.__qualname__,
    }
    fitted = type(model_class.__name__, (model_class,), entries)
    model = _loaded(path, config, dtype, fitted, None, state_dict=held)
    model.__class__ = model_class
    return model


def _loaded(
    path: str | Path, config: Any, dtype: torch.dtype, source: Any, name: str | Path | None, **given: Any
) -> PreTrainedModel:
    """Load a model by transformers, and describe errors."""
    options = {**_build_options(config, dtype), **given, "use_safetensors": True}
    if _IS_5:
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
