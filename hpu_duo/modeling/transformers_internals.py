"""Private names of transformers that this package uses: where to look when a release breaks something.

Tried with 4.55.4, 5.23.0 and 5.24.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationMixin, LogitsProcessorList, PretrainedConfig, PreTrainedModel

ENDS = "_eos_token_tensor"
"""Field of a ``GenerationConfig``: ids that end a text, a LongTensor or None, which processors read."""

FROM_MODEL_CONFIG = "_from_model_config"
"""Field of a ``GenerationConfig``: whether it was derived from a model's configuration."""

EXPERTS = "_experts_implementation"
"""Field of a configuration with exchangeable functions of experts, from transformers 5 on."""

NAME_OR_PATH = "_name_or_path"
"""Field of a configuration: where it was read from."""


def causal_model_class(of_config: type[PretrainedConfig]) -> type[PreTrainedModel] | None:
    """Return the class of the causal language model of a configuration's class; None if there is none."""
    from transformers import AutoModelForCausalLM

    mapping: Any = AutoModelForCausalLM._model_mapping
    return mapping.get(of_config, None)


def joined_parts(model_type: str) -> dict[str, tuple[str, ...]]:
    """Return which tensors of a checkpoint transformers joins by rows while it loads them.

    Returns:
        Ends of the names of parts in order, by the end of the name of the whole. Empty before transformers 5.
    """
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import Concatenate
    except ImportError:
        return {}
    found = {}
    for each in get_checkpoint_conversion_mapping(model_type) or ():
        match getattr(each, "operations", ()):
            case [Concatenate(dim=0)]:
                (whole,) = each.target_patterns
                found[whole] = tuple(each.source_patterns)
    return found


def logits_processors(model: GenerationMixin, **arguments: Any) -> LogitsProcessorList:
    """Return the processors that ``generate`` creates, in its order.

    Args:
        arguments: those of ``GenerationMixin._get_logits_processor``.

    Raises:
        TypeError, AttributeError, ValueError: arguments that a processor rejects.
    """
    generation: Any = model
    return generation._get_logits_processor(**arguments)
