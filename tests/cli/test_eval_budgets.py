"""``hpu-duo eval`` of heads with a KV budget."""

import json
from collections.abc import Callable

from typer.testing import Result

Run = Callable[..., Result]
SMALL = ("--passkey-words", "3", "--num-documents", "1")


def test_a_budget_is_a_share_of_the_longest_text_that_is_asked_for(hpu_duo: Run) -> None:
    command = ("eval", "passkey", "--num-tokens", "300", "--num-passkeys", "2", *SMALL, "--json")
    budget = ("--kv-policy", "h2o", "--kv-budget", "0.5", "--kv-prompt", "whole", "--kv-chunk", "64")
    command = (*command, "--dtype", "float32")
    done = hpu_duo(*command, *budget, "--no-enable-prefix-caching", "--max-model-len", "400")
    report = json.loads(done.stdout)
    # A key and a value of 64 numbers in float32, a position and a score in each of 200 slots of 16 heads.
    assert report["held_bytes"] == 16 * 200 * (2 * 64 * 4 + 8)
    refused = hpu_duo(*command, *budget, "--no-enable-prefix-caching", "--max-model-len", "100")
    assert refused.exit_code == 2
    assert "documents of at most 100 tokens" in refused.stderr
