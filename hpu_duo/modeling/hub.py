"""Finding a checkpoint by the name that people write: a directory, or an id of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hpu_duo.builtin import MODEL_DIR
from hpu_duo.modeling.config_checks import ADAPTER_FILE
from hpu_duo.modeling.quantised.config import BESIDE

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_HUB_ERRORS = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError)

_CONFIG_FILES = ["config.json", ADAPTER_FILE, *BESIDE]
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
_WEIGHT_FILES = ["*.safetensors"]
_UNUSED_FILES = ["*/*", "consolidated*"]
"""Files of other formats, some of them the same weights again."""


@dataclass(frozen=True)
class HubAccess:
    """Settings for the hub; None = the hub's own environment variables and login.

    Attributes:
        cache_dir: of downloads.
        token: of a user; True is that of the login, False none.
        local_files_only: use the cache only.
    """

    cache_dir: Path | None = None
    token: str | bool | None = field(default=None, repr=False)
    local_files_only: bool = False


_AS_SET_UP = HubAccess()


def find_checkpoint(
    name: str | Path,
    revision: str | None = None,
    *,
    needs_weights: bool = True,
    access: HubAccess = _AS_SET_UP,
) -> Path:
    """Return the directory of a checkpoint, after a download into the hub's cache if need be.

    Local directories take precedence over the hub. The hub's own environment variables and login apply: its
    cache, its token, its offline mode. Python files are not downloaded.

    Args:
        name: a directory, or an id such as ``org/name``.
        revision: branch, tag or commit on the hub; None is its main branch.
        needs_weights: False downloads config.json, what producers of quantised weights have beside it, or
            that of an adapter.

    Raises:
        ValueError: there is no such directory, and the hub has no such model or revision, denies access, or
            cannot be reached while its cache has none; or a revision is set for a directory.
    """
    text = str(name)
    if revision is not None and (not isinstance(revision, str) or not revision):
        raise ValueError(f"expected revision to be a branch, tag or commit, got {revision!r}")
    if text and Path(text).exists():
        if revision is not None:
            raise ValueError(
                f"a revision is for models of the hub: got {revision!r} with the directory {text!r}"
            )
        return Path(name)
    if not is_id(text):
        raise ValueError(
            "expected a directory with a transformers checkpoint, or the id of one on the hub such as "
            f"org/name, got {text!r}"
        )
    try:
        found = snapshot_download(
            text,
            revision=revision,
            allow_patterns=[*_TOKENIZER_FILES, *_WEIGHT_FILES] if needs_weights else _CONFIG_FILES,
            ignore_patterns=_UNUSED_FILES,
            cache_dir=access.cache_dir,
            token=access.token,
            local_files_only=access.local_files_only,
        )
    except _HUB_ERRORS as error:
        raise ValueError(_reason(text, revision, access, error)) from error
    return Path(found)


def _reason(name: str, revision: str | None, access: HubAccess, error: Exception) -> str:
    """Describe an error in a sentence."""
    what = repr(name) if revision is None else f"{name!r} at {revision!r}"
    if isinstance(error, GatedRepoError):
        return f"{name!r} is gated: accept its terms there, and log in with 'hf auth login' or HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"expected a revision of {name!r} on the hub, got {revision!r}"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"expected a directory or a model of the hub, got {name!r}: there is no such directory, and the "
            "hub has no such model, or none that this user may access: log in with 'hf auth login' or "
            "HF_TOKEN to see your own"
        )
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        cache = access.cache_dir or constants.HF_HUB_CACHE
        why = "may not be asked (local_files_only)" if access.local_files_only else "cannot be reached"
        return (
            f"{what} is no directory and is not in the hub's cache ({cache}), and the hub {why}: go online "
            "once to download it, or name a directory"
        )
    return f"cannot download {what} from the hub: {error}"


def is_id(text: str) -> bool:
    """Whether a name has the form of a model of the hub, ``org/name``."""
    return _ID.fullmatch(text) is not None


def split_revision(text: str) -> tuple[str, str | None]:
    """Return the name and the revision of ``org/name@revision``, as the command line has them."""
    name, is_there, revision = text.partition("@")
    if not is_there or Path(text).exists() or not is_id(name):
        return text, None
    return name, revision


_NUM_SLICES = 64
_SLICE_BYTES = 4096


def model_fingerprint(directory: Path) -> str:
    """Return a digest of config.json, and of sizes and evenly spread slices of the weights.

    Files of producers of quantised weights count, too: codes are other weights by other ones.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for name in BESIDE:
        if (directory / name).is_file():
            digest.update((directory / name).read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for index in range(_NUM_SLICES):
                file.seek(size * index // _NUM_SLICES)
                digest.update(file.read(_SLICE_BYTES))
    return digest.hexdigest()


def has_weights(directory: Path) -> bool:
    """Whether a directory has the files that ``model_fingerprint`` reads."""
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def model_name(directory: Path) -> str:
    """Return a model's name: its hub id in the hub's cache, elsewhere the directory's name."""
    path = directory.resolve()
    if path == MODEL_DIR.resolve():
        return "builtin"
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return "/".join(path.parent.parent.name.split("--")[1:])
    return path.name
