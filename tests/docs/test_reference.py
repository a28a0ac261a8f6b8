"""docs/api.md is what the code says: every public name, every method of the classes that people hold in their hands."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest

import sagas
from sagas.cli import build_parser
from sagas_store.schema import Schema
from scripts import _reference as reference
from scripts.check_docs import walk

PAGE: Final = (Path(__file__).parents[2] / reference.PAGE).read_text()
BEGIN, END = "<!-- reference: {} -->", "<!-- reference: end -->"


def written(names: str) -> str:
    return reference.renewed(f"{BEGIN.format(names)}\n{END}\n")


def test_the_page_is_what_the_code_says() -> None:
    assert reference.problems(PAGE) == []


def test_a_name_that_is_left_out_told_twice_unknown_or_out_of_date_is_reported() -> None:
    def problem(page: str) -> str:
        return "; ".join(reference.problems(page))

    assert "Client is in sagas.__all__ and not here" in problem(PAGE.replace(" Client ", " "))
    assert "Worker is here more than once" in problem(PAGE.replace("reference: Worker ", "reference: Worker Worker "))
    assert "sagas has no public Gone" in problem(PAGE.replace("reference: Worker ", "reference: Worker Gone "))
    assert "Schema has no gone" in problem(PAGE.replace("Schema[check", "Schema[gone,check"))
    assert "is not what the code says" in problem(PAGE.replace("by: str, reason: str", "by: str"))


@pytest.mark.parametrize(
    "owner",
    [sagas.Client, sagas.Run, sagas.Operator, sagas.KeyKeeper, sagas.Worker, sagas.MongoStore, sagas.TenantWorker],
)
def test_every_public_method_is_there_with_every_parameter(owner: type) -> None:
    for name, member in vars(owner).items():
        if name.startswith("_") or not inspect.isfunction(member):
            continue
        entry = PAGE.partition(f"#### `{owner.__name__}.{name}`\n")[2].partition("\n#")[0]
        assert f"def {name}(" in entry, (owner, name)
        for parameter in list(inspect.signature(member).parameters)[1:]:
            assert re.search(rf"\b{parameter}: ", entry), (owner, name, parameter)


@pytest.mark.parametrize("options", [sagas.WorkerOptions, sagas.RetryPolicy, sagas.Limits])
def test_every_option_is_explained_with_its_type_and_default(options: Any) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", written(options.__name__), re.MULTILINE))
    for field in dataclasses.fields(options):
        kind, default, meaning = rows[field.name].split(" | ")
        assert kind, field
        assert default.strip("`"), field
        assert len(meaning) > 5, field


def test_a_duration_is_shown_as_what_may_be_given_and_its_default_as_it_reads() -> None:
    assert r"| `lease` | `timedelta \| float` | `timedelta(minutes=5)` |" in written("WorkerOptions")
    assert r"| `max_elapsed` | `timedelta \| float \| None` | `None` |" in written("RetryPolicy")


class Sample:
    """A sample."""

    def method(self, one: int, /, *rest: str, two: timedelta = timedelta(seconds=90), **more: Any) -> None:
        """Do it."""

    async def wide(
        self, *, states: frozenset[sagas.State] = sagas.HELD, of: sagas.Fate = sagas.Fate.KNOWN, text: str = "text"
    ) -> str | None:
        """Do more of it."""


def test_a_signature_is_written_as_one_would_write_it() -> None:
    assert reference.signature(Sample.method) == (
        "def method(one: int, /, *rest: str, two: timedelta = timedelta(seconds=90), **more: Any) -> None"
    )
    assert reference.signature(Sample.wide) == textwrap.dedent("""\
        async def wide(
            *,
            states: frozenset[sagas.State] = HELD,
            of: sagas.Fate = Fate.KNOWN,
            text: str = "text",
        ) -> str | None""")


def commands() -> Iterator[str]:
    """The commands that do something, without the words that only lead to them."""
    parser = build_parser()
    names = [name for name, _ in walk(parser, parser.prog)]
    return (name for name in names if not any(other.startswith(f"{name} ") for other in names))


def test_every_command_is_named_beside_the_method_that_it_is() -> None:
    table = PAGE.partition("### On the command line\n")[2].partition("\n##")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`(sagas[^`]*)`", row[0])) == sorted(commands())
    for row in rows:
        for owner, method in re.findall(r"`(\w+)\.(\w+)`", row[1]):
            assert callable(getattr(Schema if owner == "Schema" else getattr(sagas, owner), method)), row
