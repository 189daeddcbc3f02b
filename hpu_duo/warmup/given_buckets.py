"""The shapes that a model captures when it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from graphs import BucketTable, StepCost
from graphs.bucket_file import read_table
from graphs.manifest import Manifest, is_manifest, read_manifest
from hpu_duo.config import EngineConfig
from hpu_duo.engine.engine import Engine
from hpu_duo.warmup.configuration import configuration_of, known_before_loading, versions_of


@dataclass(frozen=True)
class GivenBuckets:
    """A table of buckets, and the manifest that it comes from, if any.

    Attributes:
        table: the buckets; None leaves the choice to the capture backend.
        manifest: of an earlier warm-up.
        own_cost: see ``GraphConfig``.
    """

    table: BucketTable | None
    manifest: Manifest | None = None
    own_cost: bool = True

    @classmethod
    def read(cls, buckets: BucketTable | str | Path | None, block_size: int) -> GivenBuckets:
        """Read ``buckets`` of ``from_pretrained``: a table, None, or the path of a table or manifest.

        Raises:
            ValueError: a file is neither a table nor a manifest.
        """
        if not isinstance(buckets, str | Path):
            return cls(buckets)
        cost = StepCost(block_size=block_size)
        if not is_manifest(buckets):
            return cls(read_table(buckets, cost), own_cost=False)
        manifest = read_manifest(buckets)
        return cls(manifest.table(cost), manifest, own_cost=False)

    def complete(self, config: EngineConfig) -> EngineConfig:
        """Fill in the settings that a configuration leaves open with those of the manifest.

        The number of blocks, for example, would otherwise follow from the memory that happens to be free. The
        result also says whose cost function ranks the table.

        Raises:
            ValueError: a setting differs from the manifest's, as far as is known before weights are read.
        """
        config = replace(config, graph=replace(config.graph, own_cost=self.own_cost))
        if self.manifest is None:
            return config
        self.manifest.check(known_before_loading(config), {}, known_only=True)
        scheduler, cache = config.scheduler, config.cache
        length = self.manifest.configuration.get("limits.max_model_len")
        num_blocks = self.manifest.configuration.get("limits.num_blocks")
        if scheduler.max_model_len is None and isinstance(length, int):
            scheduler = replace(scheduler, max_model_len=length)
        if cache.num_blocks is None and cache.kv_cache_bytes is None and num_blocks:
            cache = replace(cache, num_blocks=num_blocks)
        return replace(config, scheduler=scheduler, cache=cache)

    def check(self, engine: Engine) -> None:
        """Raise ValueError unless the manifest, if there is one, is for this engine."""
        if self.manifest is not None:
            self.manifest.check(configuration_of(engine), versions_of(engine.runner.runtime))
