"""What callers give, checked before it reaches the database: ids, states, sagas, contexts, keys, times, numbers.

A filter's value that is not what it should be is never harmless: a text where several are wanted is read letter by
letter, an object becomes a question to the server of its own, a time without a zone means another one there. So each is
refused by name, with what to give instead. Clients, operators and keepers of keys share what stands here, and so say
the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime
from typing import Any, Final

from sagas.definition import Saga
from sagas.errors import InvalidInput, PayloadTooLarge, RunNotFound
from sagas.limits import Limits
from sagas.payload import NotJournalable, dump_context
from sagas.sealing import SEALED_OVERHEAD_BYTES
from sagas.tenancy import Reach
from sagas.texts import check_text
from sagas_store import MongoStore
from sagas_store.inputs import check_kind, check_several, kind_of
from sagas_store.numbers import COUNT_MAX, check_count
from sagas_store.records import RunFilter, RunPosition, RunRecord
from sagas_store.states import HELD, OPEN, SETTLED, State

__all__ = [
    "GROUPS",
    "StatesGiven",
    "check_aware",
    "check_context",
    "check_limit",
    "check_run_id",
    "check_run_ids",
    "check_saga",
    "choose_runs",
    "choose_states",
    "pages",
    "read_run",
]

_AT_ONCE: Final = 50
"""So many runs a bulk verb acts on at once."""

StatesGiven = State | str | Iterable[State | str]
"""How states are given: one of them, or several, as members of `State` or by name; `held`, `open` and `settled` stand
for all states of their kind."""
GROUPS: Final = {"held": HELD, "open": OPEN, "settled": SETTLED}


def choose_runs(
    store: MongoStore,
    reach: Reach,
    states: frozenset[State],
    *,
    tenant: str | None = None,
    saga: str | None = None,
    key_prefix: str | None = None,
    started_before: datetime | None = None,
    stopped: bool | None = None,
    waiting: bool = False,
) -> RunFilter:
    """The runs that a list or a bulk verb means. Raises InvalidInput."""
    if saga is not None:
        if isinstance(saga, Saga):
            raise InvalidInput("saga", "must be the name of a saga here: give its .name")
        check_text("saga", saga)
    if key_prefix is not None:
        check_text("key_prefix", key_prefix)
        if store.keyring is not None:  # hashes have no prefixes
            raise InvalidInput(
                "key_prefix", "keys are sealed here and cannot be searched by prefix; use saga, tenant or time"
            )
    return RunFilter(
        states=states,
        tenant=reach.choose(tenant),
        saga=saga,
        key_prefix=key_prefix,
        created_before=check_aware("started_before", started_before) if started_before is not None else None,
        stopped=stopped,
        waiting=waiting,
    )


async def read_run(store: MongoStore, reach: Reach, run_id: str, *, with_input: bool = False) -> RunRecord:
    """The run with this id, as a majority has it. Raises RunNotFound, also for another tenant's, and InvalidInput."""
    check_run_id(run_id)
    await store.ready()
    run = await store.runs.get(run_id, with_input=with_input)
    if run is None or not reach.covers(run):
        raise RunNotFound(run_id)
    return run


async def pages(store: MongoStore, chosen: RunFilter, *, limit: int) -> AsyncIterator[list[str]]:
    """The ids of the chosen runs, newest first, at most `limit`, so many at a time as may be acted on at once.

    By position, not by number: runs that move meanwhile neither repeat nor hide others.
    """
    after: RunPosition | None = None
    left = limit
    while left > 0:
        page = await store.runs.page(chosen, after=after, limit=min(_AT_ONCE, left))
        if page:
            yield [run.run_id for run in page]
            after = RunPosition(page[-1].created_at, page[-1].run_id)
        if len(page) < _AT_ONCE:
            return
        left -= len(page)


def choose_states(field: str, given: Any, among: Iterable[State] = State) -> frozenset[State]:
    """The states given, one or several, as `State` or by name, a group's too. Raises InvalidInput.

    All have to be `among` these.
    """
    fitting = frozenset(among)
    several = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    chosen: set[State] = set()
    for one in several:
        if isinstance(one, str) and one in GROUPS:
            chosen |= GROUPS[one]
            continue
        try:
            chosen.add(State(one))
        except ValueError:
            what = repr(one) if isinstance(one, str) else kind_of(one)
            raise InvalidInput(field, f"{what} is not a state; {_possible(fitting)}") from None
    if others := chosen - fitting:
        raise InvalidInput(field, f"{', '.join(sorted(others))}: does not apply here; {_possible(fitting)}")
    return frozenset(chosen)


def _possible(fitting: frozenset[State]) -> str:
    groups = [name for name, states in GROUPS.items() if states <= fitting]
    also = f", and for several at once {', '.join(groups)}" if groups else ""
    return f"possible here: {', '.join(sorted(fitting))}{also}"


def check_run_id(run_id: object, field: str = "run_id") -> str:
    """The id, if it is a text. Raises InvalidInput."""
    return check_text(field, run_id)


def check_run_ids(field: str, given: Iterable[str]) -> list[str]:
    """Several run ids, each once, in their order. Raises InvalidInput; one text is not several."""
    several = check_several(field, given, "run ids", f"{field}=[run_id]")
    return list(dict.fromkeys(check_run_id(one, field) for one in several))


def check_saga(saga: object) -> Saga[Any]:
    """The definition of a saga. Raises InvalidInput."""
    return check_kind("saga", saga, Saga, "the object that its steps are declared on")


def check_context(saga: Saga[Any], context: object, limits: Limits, *, sealed: bool) -> bytes:
    """The bytes of a context, to store or first to seal. Raises InvalidInput, PayloadTooLarge."""
    limits.check_room(saga)
    try:
        payload, _ = dump_context(saga.context, context)
    except NotJournalable as error:
        raise InvalidInput("context", str(error).replace("it returned", "is")) from None
    stored = len(payload) + (SEALED_OVERHEAD_BYTES if sealed else 0)
    if stored > limits.context_bytes_max:
        raise PayloadTooLarge("the context", stored, limits.context_bytes_max)
    return payload


def check_aware(field: str, at: object) -> datetime:
    """The time in UTC. Raises InvalidInput unless it has a zone."""
    if not isinstance(at, datetime) or at.utcoffset() is None:
        raise InvalidInput(
            field, f"must be an aware datetime, for instance datetime(..., tzinfo=UTC), not {_time_kind(at)}"
        )
    try:
        return at.astimezone(UTC)
    except OverflowError:
        raise InvalidInput(field, "is beyond the years 1 to 9999") from None


def check_limit(limit: object, most: int = COUNT_MAX) -> int:
    """How many at most. Raises InvalidInput."""
    return check_count("limit", limit, most=most)


def _time_kind(at: object) -> str:
    return "one without a zone" if isinstance(at, datetime) else kind_of(at)
