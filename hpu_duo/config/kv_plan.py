"""KV plans: what each head stores (all tokens, a ring, or a budget under a policy), and their files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

FORMAT = "hpu-duo kv plan 1"
ALL, RING = "all", "ring"
_FIELDS = {"format", "num_layers", "num_kv_heads", "default", "heads"}
_KEPT = {"keep", "budget"}
_PLACES = {"layers", "heads"}


@dataclass(frozen=True)
class Keep:
    """The choice of a head: the tokens of each request that it stores.

    Attributes:
        what: ``all``, a ring such as ``ring:sink=4,recent=252``, or a KV policy with options, such as
            ``h2o:recent=0.25``.
        budget: tokens under a policy, or, up to 1, their share of ``max_model_len``; None for others.

    Raises:
        ValueError: a policy without a budget, or a budget that is none.
    """

    what: str = ALL
    budget: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.what, str) or not self.what:
            raise ValueError(f"expected all, ring or a KV policy, got {self.what!r}")
        if self.has_policy is not (self.budget is not None):
            wanted = "a budget" if self.has_policy else "no budget"
            raise ValueError(f"expected {wanted} for {self.what!r}, got {self.budget}")
        if self.budget is None:
            return
        is_number = isinstance(self.budget, int | float) and not isinstance(self.budget, bool)
        if not is_number or not (
            0 < self.budget <= 1 or (self.budget > 1 and float(self.budget).is_integer())
        ):
            raise ValueError(
                f"expected a budget to be a share above 0 and up to 1, or a whole number of tokens, "
                f"got {self.budget!r}"
            )

    @property
    def name(self) -> str:
        """The choice without its options."""
        return self.what.partition(":")[0]

    @property
    def has_policy(self) -> bool:
        """Whether it is a KV policy."""
        return self.name not in (ALL, RING)


@dataclass(frozen=True)
class KVPlan:
    """Choices of all KV heads of a model.

    Attributes:
        layers: by layer and KV head, in the model's order; equally many heads in each layer.

    Raises:
        ValueError: no head, or layers of different numbers of heads.
    """

    layers: tuple[tuple[Keep, ...], ...]

    def __post_init__(self) -> None:
        counts = {len(heads) for heads in self.layers}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(f"expected equally many KV heads in each layer, 1 or more, got {sorted(counts)}")

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        return len(self.layers[0])

    @property
    def has_budgets(self) -> bool:
        """Whether any head has a KV policy."""
        return any(keep.has_policy for heads in self.layers for keep in heads)

    @classmethod
    def of_mask(
        cls, retrieves: Iterable[Iterable[bool]], streaming: Keep, retrieval: Keep = Keep()
    ) -> KVPlan:
        """Create the plan of a head pattern.

        Args:
            retrieves: by layer and KV head, whether it is a retrieval head; ``HeadPattern.mask``.
            streaming, retrieval: what heads of each kind store.
        """
        return cls(tuple(tuple(retrieval if each else streaming for each in heads) for heads in retrieves))

    def as_dict(self) -> dict[str, Any]:
        """Return the content of a file: the most frequent choice is the default, others are listed."""
        counts: dict[Keep, int] = {}
        for keep in (keep for heads in self.layers for keep in heads):
            counts[keep] = counts.get(keep, 0) + 1
        default = max(counts, key=lambda keep: (counts[keep], keep == Keep()))
        places: dict[tuple[Keep, tuple[int, ...]], list[int]] = {}
        for layer, heads in enumerate(self.layers):
            for keep in dict.fromkeys(heads):
                if keep != default:
                    found = tuple(number for number, each in enumerate(heads) if each == keep)
                    places.setdefault((keep, found), []).append(layer)
        return {
            "format": FORMAT,
            "num_layers": len(self.layers),
            "num_kv_heads": self.num_kv_heads,
            "default": _written(default),
            "heads": [
                {"layers": _ranges(layers), "heads": _ranges(heads), **_written(keep)}
                for (keep, heads), layers in places.items()
            ],
        }

    @classmethod
    def from_dict(cls, fields: object) -> KVPlan:
        """Read what ``as_dict`` returns.

        Raises:
            ValueError: something is missing, unknown, out of range, or set twice for a head.
        """
        given = _mapping("a KV plan", fields, _FIELDS, needed=_FIELDS - {"default", "heads"})
        if given["format"] != FORMAT:
            raise ValueError(f"expected the format {FORMAT!r}, got {given['format']!r}")
        num_layers, num_heads = (_count(name, given[name]) for name in ("num_layers", "num_kv_heads"))
        default = _keep("default", given.get("default", {"keep": ALL}))
        entries = given.get("heads", [])
        if not isinstance(entries, list):
            raise ValueError(f"expected heads to be a list, got {entries!r}")
        kept: dict[tuple[int, int], Keep] = {}
        for number, entry in enumerate(entries):
            where = f"entry {number + 1} of heads"
            one = dict(_mapping(where, entry, _KEPT | _PLACES, needed={"keep"}))
            layers = _numbers(f"layers of {where}", one.pop("layers", ALL), num_layers)
            heads = _numbers(f"heads of {where}", one.pop("heads", ALL), num_heads)
            keep = _keep(where, one)
            for place in ((layer, head) for layer in layers for head in heads):
                if place in kept:
                    raise ValueError(f"{where} names head {place[1]} of layer {place[0]} again")
                kept[place] = keep
        return cls(
            tuple(
                tuple(kept.get((layer, head), default) for head in range(num_heads))
                for layer in range(num_layers)
            )
        )

    @classmethod
    def load(cls, path: str | Path) -> KVPlan:
        """Read a file, YAML or JSON.

        Raises:
            ValueError: it cannot be read, or is no plan; see ``from_dict``.
        """
        try:
            fields = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"cannot read the KV plan {path}: {error}") from None
        try:
            return cls.from_dict(fields)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def save(self, path: str | Path, comments: Iterable[str] = ()) -> None:
        """Write a file, which must not exist.

        Args:
            comments: leading lines with the origin of the plan.

        Raises:
            FileExistsError: it does.
        """
        with Path(path).open("x", encoding="utf-8") as file:
            file.writelines(f"# {' '.join(line.split())}\n" for line in comments)
            yaml.safe_dump(self.as_dict(), file, sort_keys=False)


def _written(keep: Keep) -> dict[str, Any]:
    return {"keep": keep.what} if keep.budget is None else {"keep": keep.what, "budget": keep.budget}


def _keep(where: str, fields: object) -> Keep:
    given = _mapping(where, fields, _KEPT, needed={"keep"})
    try:
        return Keep(given["keep"], given.get("budget"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _mapping(where: str, fields: object, known: set[str], needed: set[str]) -> Mapping[str, Any]:
    if not isinstance(fields, dict):
        raise ValueError(f"expected {where} to be a mapping, got {fields!r}")
    names = set(map(str, fields))
    if unknown := sorted(names - known):
        raise ValueError(f"expected {', '.join(sorted(known))} in {where}, got {', '.join(unknown)}")
    if missing := sorted(needed - names):
        raise ValueError(f"expected {', '.join(missing)} in {where}")
    return fields


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"expected {name} to be an integer >= 1, got {value!r}")
    return value


def _numbers(where: str, value: object, count: int) -> list[int]:
    """Numbers below ``count``, from ``all``, a number, or text such as ``0-3,7``."""
    if value == ALL:
        return list(range(count))
    found: list[int] = []
    for part in str(value).split(","):
        first, dash, last = part.strip().partition("-")
        try:
            run = range(int(first), int(last if dash else first) + 1)
            if not run:
                raise ValueError
            found += run
        except ValueError:
            raise ValueError(f"expected {where} as 'all' or such as '0-3,7', got {value!r}") from None
    if not found or min(found) < 0 or max(found) >= count or len(set(found)) < len(found):
        raise ValueError(f"expected {where} to be different numbers from 0 to {count - 1}, got {value!r}")
    return found


def _ranges(numbers: Iterable[int]) -> str:
    """Write numbers, in order, such as ``0-3,7``."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
