"""docs/journal.md explains every kind of entry and everything that an entry can announce, and nothing else."""

import re
from pathlib import Path
from typing import Any, Final

from docs.examples.order_fulfilment.saga import fulfil_order
from sagas.cli.looking import _ENTRY_COLUMNS
from sagas.decide import Action, Activity, BeginRollback, Hold, NoteRefusal, Perform, Settle, intent
from sagas_store.entries import Cause, Kind
from sagas_store.states import HELD, SETTLED

PAGE: Final = (Path(__file__).parents[2] / "docs/journal.md").read_text()


def rows(heading: str) -> list[str]:
    """The first cells of the table below a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)


def announced() -> set[str]:
    step: Any = fulfil_order.steps[0]
    actions: list[Action] = [
        *(Perform(activity, step, 1) for activity in Activity),
        *(BeginRollback(cause, None) for cause in Cause),
        *(Hold(state, "") for state in HELD),
        *(Settle(state) for state in SETTLED),
        NoteRefusal(),
    ]
    return {intent(action) for action in actions}


def test_every_kind_of_entry_is_explained_once() -> None:
    assert sorted(rows("The kinds")) == sorted(Kind)


def test_everything_that_may_be_announced_is_explained() -> None:
    shape = {what.partition(":")[0] for what in announced()}
    assert sorted(what.partition(":")[0] for what in rows("next")) == sorted(shape)
    assert all(f"`{cause}`" in PAGE for cause in Cause)


def test_the_example_shows_what_there_is() -> None:
    (header,) = re.findall(r"^seq .*$", PAGE, re.MULTILINE)
    assert tuple(header.split()) == _ENTRY_COLUMNS
    lines = re.findall(r"^\d+ +[\d-]+ [\d:.]+Z +(\w+) .*? (\w+):(\w+)(?: |$)", PAGE, re.MULTILINE)
    assert len(lines) == 7
    for kind, action, _ in lines:
        assert Kind(kind) is not Kind.UNKNOWN
        assert action in {what.partition(":")[0] for what in announced()}
