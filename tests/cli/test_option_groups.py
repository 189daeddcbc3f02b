"""Options written once: what typer is given, and what the command gets."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from hpu_duo.cli.options import Only, grouped
from hpu_duo.config.overrides import EngineOverrides


@dataclass(frozen=True)
class Window:
    """A group."""

    sink: Annotated[int | None, typer.Option(help="First tokens.")] = None
    recent: Annotated[int, typer.Option("--recent", "--newest", help="Newest tokens.")] = 4
    seed: int = 7


BothSizes = Annotated[Window, Only("sink", "recent")]


def run(command: object, *arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command)  # type: ignore[type-var]
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def test_a_group_arrives_whole_with_what_was_given_and_the_defaults_of_the_rest() -> None:
    got: list[tuple[str, Window, bool]] = []

    @grouped
    def command(
        *,
        name: Annotated[str, typer.Option()],
        window: BothSizes,
        loud: Annotated[bool, typer.Option("--loud")] = False,
    ) -> None:
        """Does nothing."""
        got.append((name, window, loud))

    assert run(command, "--name", "a", "--newest", "9")[0] == 0
    assert run(command, "--name", "b", "--sink", "1", "--loud")[0] == 0
    assert got == [("a", Window(None, 9), False), ("b", Window(1, 4), True)]


def test_options_stand_where_their_group_stood_and_only_those_that_are_offered() -> None:
    @grouped
    def command(
        *,
        first: Annotated[int, typer.Option()] = 0,
        window: Annotated[Window, Only("recent")],
        last: Annotated[int, typer.Option()] = 0,
    ) -> None:
        """Does nothing."""

    code, text = run(command, "--help")
    assert code == 0
    assert text.index("--first") < text.index("--recent") < text.index("--last")
    assert "--sink" not in text
    assert "Does nothing." in text
    assert run(command, "--sink", "1")[0] == 2


@pytest.mark.parametrize("name", ["seed", "depth"])
def test_fields_that_are_no_options_are_refused(name: str) -> None:
    def command(*, window: Annotated[Window, Only(name)]) -> None:
        """Does nothing."""

    with pytest.raises(
        TypeError, match=f"Window.{name}: expected a field that is an option and has a default"
    ):
        grouped(command)


def test_settings_arrive_by_name_with_sizes_in_bytes_and_without_what_is_left_open() -> None:
    got: list[EngineOverrides] = []

    @grouped
    def command(
        *,
        engine: Annotated[
            EngineOverrides, Only("kv_cache_bytes", "sink", "rank_timeout_s", max_num_seqs=None, decode_len=8)
        ],
    ) -> None:
        """Does nothing."""
        got.append(engine)

    assert run(command, "--kv-cache-bytes", "2MiB", "--rank-timeout-seconds", "3")[0] == 0
    assert got == [{"kv_cache_bytes": 2 << 20, "sink": None, "rank_timeout_s": 3.0, "decode_len": 8}]
    code, text = run(command, "--kv-cache-bytes", "many")
    assert code == 2
    assert "many" in text
    assert run(command, "--sparsity", "0.5")[0] == 2


def test_settings_that_are_for_python_alone_are_no_options() -> None:
    def command(*, engine: Annotated[EngineOverrides, Only("score_bytes")]) -> None:
        """Does nothing."""

    with pytest.raises(TypeError, match="score_bytes: expected settings that are options"):
        grouped(command)
