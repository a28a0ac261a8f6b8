"""What the database holds: collections, validators, indexes, and the query that each index serves.

This module is the source; `schema/v1/*.json` is generated from it, committed and checked for drift, so that a reviewer
sees a change of stored shape as a diff. `Schema` compares a database with it (`check`), says what `apply` would do
(`plan`) and does it (`apply`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from pymongo import IndexModel
from pymongo.errors import CollectionInvalid, OperationFailure

from sagas_store.claims import CLAIM_INDEX, TURN_INDEX
from sagas_store.drivers import Document, Driver
from sagas_store.entries import Cause, Kind
from sagas_store.errors import SchemaMismatch
from sagas_store.faults import Patience
from sagas_store.journal import JOURNAL_SPEC_NAME
from sagas_store.keys import KEYS_SPEC_NAME, KeyState, Purpose
from sagas_store.runs import RUNS_SPEC_NAME
from sagas_store.states import HELD, OPEN, SETTLED, Decision, Phase, State

__all__ = ["BUILDING", "SCHEMA", "SCHEMA_VERSION", "CollectionSpec", "IndexSpec", "Schema"]

SCHEMA_VERSION: Final = 1
BUILDING: Final = timedelta(minutes=30)
"""How long the server may take for one index of a large collection."""


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """One index, why it exists, and for whom."""

    name: str
    keys: tuple[tuple[str, int], ...]
    serves: tuple[str, ...]
    """The named queries that this index answers; each is explained against a real server by the tests."""
    partial: Document | None = None
    unique: bool = False

    def model(self) -> IndexModel:
        more: dict[str, Any] = {"partialFilterExpression": self.partial} if self.partial is not None else {}
        if self.unique:
            more["unique"] = True
        return IndexModel(list(self.keys), name=self.name, **more)


@dataclass(frozen=True, slots=True)
class CollectionSpec:
    """One collection."""

    name: str
    purpose: str
    validator: Document
    indexes: tuple[IndexSpec, ...]
    primary_key_serves: tuple[str, ...]


def _closed(required: list[str], properties: Document) -> Document:
    """A document of exactly these properties: a misspelt field is refused, not stored."""
    return {"bsonType": "object", "required": required, "additionalProperties": False, "properties": properties}


def _words(words: Any) -> Document:
    return {"enum": sorted(str(word) for word in words)}


_NAME: Final = {"bsonType": "string", "minLength": 1, "maxLength": 64}
_STRING: Final = {"bsonType": "string"}
_DATE: Final = {"bsonType": "date"}
_BYTES: Final = {"bsonType": "binData"}
_COUNT: Final = {"bsonType": ["int", "long"], "minimum": 0}

_RUN: Final = _closed(
    ["_id", "saga", "version", "fingerprint", "state", "phase", "attempts", "created_at", "input"],
    {
        "_id": _STRING,
        "saga": _NAME,
        "version": {**_COUNT, "minimum": 1},
        "fingerprint": _STRING,
        "tenant": {"bsonType": "string", "minLength": 1},
        "key": _STRING,
        "sealed_key": _BYTES,
        "keys": {"bsonType": "array", "minItems": 1, "items": {"bsonType": "string", "pattern": "^[0-9a-f]{16}$"}},
        "token": _STRING,
        "input": _BYTES,
        "state": _words(State),
        "phase": _words(set(Phase) - {Phase.UNKNOWN}),
        "attempts": _COUNT,
        "created_at": _DATE,
        "due_at": _DATE,
        "settled_at": _DATE,
        "gate_passed_at": _DATE,
        "claim": _closed(
            ["token", "worker", "taken_from", "at"],
            {"token": _STRING, "worker": _STRING, "taken_from": _words(OPEN), "at": _DATE},
        ),
        "held": _closed(["reason", "since"], {"reason": _STRING, "since": _DATE}),
        "blocked": _closed(
            ["count", "since", "failure", "why"],
            {
                "count": _COUNT,
                "since": _DATE,
                "failure": _STRING,
                "why": _STRING,
                "key_id": _STRING,
                "denied_since": _DATE,
            },
        ),
        "stop": _closed(
            ["decision", "by", "asked_at"],
            {"decision": _words(Decision), "by": _STRING, "reason": _BYTES, "asked_at": _DATE},
        ),
        "deadline": _DATE,
        "overdue": {"bsonType": "bool"},
        "restarted_from": _STRING,
        "started_by": _STRING,
        "started_reason": _BYTES,
    },
)


def _with(field: str, *, present: bool) -> Document:
    return {"required": [field]} if present else {"not": {"required": [field]}}


def _in(states: frozenset[State]) -> Document:
    return {"properties": {"state": _words(states)}}


# A state and the fields that go with it are written together or not at all: a settled run that is still due, or a held
# one without its reason, cannot be stored by anybody.
_RUN_SHAPES: Final = [
    {"allOf": [_in(OPEN), _with("due_at", present=True), _with("settled_at", present=False)]},
    {
        "allOf": [
            _in(HELD),
            _with("held", present=True),
            _with("due_at", present=False),
            _with("settled_at", present=False),
        ]
    },
    {"allOf": [_in(SETTLED), _with("settled_at", present=True), _with("due_at", present=False)]},
]

_ENTRY: Final = _closed(
    ["_id", "kind", "at", "attempt", "worker", "token"],
    {
        "_id": _closed(["run", "seq"], {"run": _STRING, "seq": {**_COUNT, "minimum": 1}}),
        "kind": _words(set(Kind) - {Kind.UNKNOWN}),
        "at": _DATE,
        "attempt": {**_COUNT, "minimum": 1},
        "worker": _STRING,
        "token": _STRING,
        "step": _NAME,
        "try": {**_COUNT, "minimum": 1},
        "next": _STRING,
        "due_at": _DATE,
        "in_doubt": {"bsonType": "bool"},
        "cause": _words(Cause),
        "taken_from": _words(OPEN),
        "by": _STRING,
        "reason": _BYTES,
        "asked_at": _DATE,
        "payload": _BYTES,
    },
)

_KEY: Final = _closed(
    ["_id", "purpose", "state", "created_at", "master"],
    {
        "_id": {"bsonType": "string", "pattern": "^[0-9a-f]{16}$"},
        "tenant": {"bsonType": "string", "minLength": 1},
        "purpose": _words(Purpose),
        "state": _words(KeyState),
        "created_at": _DATE,
        "retired_at": _DATE,
        "retired_by": _STRING,
        "retired_reason": _STRING,
        "destroyed_at": _DATE,
        "destroyed_by": _STRING,
        "destroyed_reason": _STRING,
        "master": _STRING,
        "wrapped": _BYTES,
    },
)

# A destroyed key has no wrapped bytes, and no other key is without them.
_KEY_SHAPES: Final = [
    {
        "allOf": [
            {"properties": {"state": _words({KeyState.ACTIVE, KeyState.RETIRED})}},
            _with("wrapped", present=True),
            _with("destroyed_at", present=False),
        ]
    },
    {
        "allOf": [
            {"properties": {"state": _words({KeyState.DESTROYED})}},
            _with("wrapped", present=False),
            _with("destroyed_at", present=True),
        ]
    },
]

SCHEMA: Final = (
    CollectionSpec(
        name=RUNS_SPEC_NAME,
        purpose="one document per run: its state, its lease, what it was started with",
        validator={"$jsonSchema": {**_RUN, "oneOf": _RUN_SHAPES}},
        indexes=(
            IndexSpec(
                name=CLAIM_INDEX,
                keys=(("saga", 1), ("version", 1), ("due_at", 1)),
                partial={"due_at": {"$exists": True}},
                serves=("find_due", "next_due"),
            ),
            IndexSpec(
                name=TURN_INDEX,
                keys=(("saga", 1), ("version", 1), ("tenant", 1), ("due_at", 1)),
                partial={"due_at": {"$exists": True}},
                serves=("find_in_turn",),
            ),
            IndexSpec(
                name="sealed_with",
                keys=(("keys", 1), ("_id", 1)),
                partial={"keys": {"$exists": True}},
                serves=("needing_key", "count_needing_key"),
            ),
            IndexSpec(
                name="list_of_tenant",
                keys=(("tenant", 1), ("state", 1), ("created_at", -1), ("_id", -1)),
                partial={"tenant": {"$exists": True}},
                serves=("page_of_tenant",),
            ),
            IndexSpec(
                name="list",
                keys=(("state", 1), ("created_at", -1), ("_id", -1)),
                serves=("page_of_states",),
            ),
            IndexSpec(
                # Of the runs that wait: those that do not open, beside any number that do. Quarantined ones are all of
                # that kind, so any index of states serves them.
                name="blocked",
                keys=(("state", 1), ("created_at", 1), ("_id", 1)),
                partial={"blocked": {"$exists": True}},
                serves=("oldest_blocked", "oldest_blocked_of_tenant", "any_blocked", "blocked_groups"),
            ),
            IndexSpec(
                name="list_of_saga",
                keys=(("saga", 1), ("state", 1), ("created_at", -1), ("_id", -1)),
                serves=("page_of_states_and_saga",),
            ),
        ),
        primary_key_serves=("claim", "renew", "settle", "get", "beginning_with", "at_rest", "replace", "keep_keys"),
    ),
    CollectionSpec(
        name=JOURNAL_SPEC_NAME,
        purpose="one document per entry of a run's journal, keyed by run and number; only its seal ever changes",
        validator={"$jsonSchema": _ENTRY},
        indexes=(),
        primary_key_serves=("append", "load", "load_many", "last_context", "reseal"),
    ),
    CollectionSpec(
        name=KEYS_SPEC_NAME,
        purpose="one document per data key of a tenant, wrapped by a master key that is kept elsewhere",
        validator={"$jsonSchema": {**_KEY, "oneOf": _KEY_SHAPES}},
        indexes=(
            IndexSpec(
                name="active",
                keys=(("tenant", 1), ("purpose", 1)),
                partial={"state": KeyState.ACTIVE},
                unique=True,
                serves=("newest_active",),
            ),
            IndexSpec(
                name="of_tenant",
                keys=(("tenant", 1), ("created_at", 1), ("_id", 1)),
                serves=("list_of_tenant", "destroy"),
            ),
        ),
        primary_key_serves=("get", "insert_first", "rotate", "rewrap", "discard", "page"),
    ),
)


class Schema:
    """The schema of one database, compared with what this version needs."""

    def __init__(self, driver: Driver, prefix: str, patience: Patience) -> None:
        self._driver = driver
        self._prefix = prefix
        self._patience = patience

    async def plan(self) -> list[str]:
        """What `apply` would do, one line each, in order; empty when there is nothing to do."""
        return [line for spec in SCHEMA for line, _ in await self._steps(spec)]

    async def check(self) -> None:
        """Raise SchemaMismatch, naming every difference, unless the database is as this version needs it."""
        if differences := await self.plan():
            # To make what a misspelt name lacks would make a second database: then the name is the question.
            nothing = all(f"create collection {self._prefix + spec.name}" in differences for spec in SCHEMA)
            raise SchemaMismatch(differences, self._driver.database.name, nothing=nothing)

    async def apply(self, *, patience: timedelta | float = BUILDING) -> list[str]:
        """Bring the database to what this version needs and return what was done. Safe to repeat, and to race.

        Adds and changes; never drops a collection or a document. An index of ours whose definition changed is rebuilt.
        Each change may take as long as `patience`, whatever the store's own is: that one is for small questions, and
        bounds how long a server is waited for that is not there at all. Raises StoreUnavailable; call it again then.
        """
        building = Patience(patience, patience, unanswered=self._driver.unanswered)
        done = []
        for spec in SCHEMA:
            for line, command in await self._steps(spec):
                await building.call(f"apply schema: {line}", functools.partial(self._run, command))
                done.append(line)
        return done

    async def _run(self, command: Document) -> None:
        try:
            await self._driver.database.command(command)
        except CollectionInvalid:
            pass
        except OperationFailure as error:
            # Two appliers raced: the collection exists (48) or the index is gone (27) already, as wanted.
            if error.code not in (48, 27):
                raise

    async def _steps(self, spec: CollectionSpec) -> list[tuple[str, Document]]:
        name = self._prefix + spec.name

        async def options() -> Document | None:
            found = await (await self._list(name)).to_list(None)
            return found[0]["options"] if found else None

        stored = await self._patience.call("read schema", options)
        strict = {"validator": spec.validator, "validationLevel": "strict", "validationAction": "error"}
        steps: list[tuple[str, Document]] = []
        if stored is None:
            steps.append((f"create collection {name}", {"create": name, **strict}))
        elif any(stored.get(option, default) != strict[option] for option, default in _STORED_DEFAULTS.items()):
            steps.append((f"set the validator of {name}", {"collMod": name, **strict}))

        async def indexes() -> list[Document]:
            if stored is None:
                return []
            found: list[Document] = await (await _awaited(self._driver.database[name].list_indexes())).to_list(None)
            return found

        present = {index["name"]: index for index in await self._patience.call("read indexes", indexes)}
        for index in spec.indexes:
            wanted = index.model().document
            create = {"createIndexes": name, "indexes": [_plain(wanted)]}
            if (found := present.get(index.name)) is None:
                steps.append((f"create index {index.name} on {name}", create))
            elif _definition(found) != _definition(wanted):
                steps.append((f"drop index {index.name} of {name}", {"dropIndexes": name, "index": index.name}))
                steps.append((f"create index {index.name} on {name}", create))
        return steps

    async def _list(self, name: str) -> Any:
        return await _awaited(self._driver.database.list_collections(filter={"name": name}))


_STORED_DEFAULTS: Final = {"validator": None, "validationLevel": "strict", "validationAction": "error"}
"""What the server leaves out of its answer when it is at its default."""


async def _awaited(value: Any) -> Any:
    # PyMongo's asyncio client gives these cursors from a coroutine; Motor partly gives the cursor itself.
    return await value if hasattr(value, "__await__") else value


def _plain(index: Any) -> Document:
    return {key: dict(value) if key == "key" else value for key, value in index.items()}


def _definition(index: Any) -> tuple[Any, ...]:
    return (
        tuple(dict(index["key"]).items()),
        index.get("partialFilterExpression"),
        index.get("collation"),
        *(bool(index.get(flag)) for flag in ("unique", "sparse", "hidden")),
    )
