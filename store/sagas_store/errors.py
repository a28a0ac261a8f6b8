"""What can go wrong in the store, sorted by what the caller can do about it.

    SagaError                     the root of every error that is meant for a caller
    ├── InvalidInput              an argument or an option is wrong: the field and the fix are named
    │   └── NoTenantDatabase      no database can be named after this tenant: name it otherwise
    └── StoreError
        ├── StoreUnavailable      the server did not answer in time: try again later, nothing is known to have happened
        ├── FenceLost             somebody else drives the run now: stop at once, write nothing more
        ├── StopFirst             a stop was recorded that the holder does not know of: look at it first
        ├── WrongState            the run is no longer in the state that the move starts from
        ├── RunExists             a run with this id is there already: compare it with what you meant to start
        ├── UnreadableRun         a newer version has written the run, or it is damaged: use the newer version
        ├── KeyIdTaken            another data key has this id: draw another one
        ├── RecordTooLarge        more bytes than one document may hold: make the payload smaller
        ├── UnsafeServer          the server cannot keep the store's promises: change the server, the reason is named
        ├── SchemaMismatch        the database does not hold what this version expects: apply the schema
        ├── IllegalTransition     a bug: the state table has no such move
        ├── NoConnection          the connection string or the database's name cannot be used: correct it
        └── StoreRefused          the server refused for good (no permission, a validator): read the message

No message carries a payload, and none carries a connection string.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "FenceLost",
    "IllegalTransition",
    "InvalidInput",
    "KeyIdTaken",
    "NoConnection",
    "NoTenantDatabase",
    "RecordTooLarge",
    "RunExists",
    "SagaError",
    "SchemaMismatch",
    "StopFirst",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "UnreadableRun",
    "UnsafeServer",
    "WrongState",
    "unreadable",
]


class SagaError(Exception):
    """The root: catch this to catch everything that this project raises on purpose."""


class InvalidInput(SagaError, ValueError, TypeError):
    """What was given from outside is wrong; `field` names it. Also what Python's own code raises for the like."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class StoreError(SagaError):
    """Something about the database; see the subclasses for what to do."""


class StoreUnavailable(StoreError):
    """The server could not be reached, or could not acknowledge, within the store's patience.

    The operation may or may not have happened. Every operation of the store is safe to repeat, so
    repeat it later, or leave it to the next owner of the lease; never conclude anything from it.
    """

    def __init__(self, operation: str, cause: str) -> None:
        super().__init__(f"{operation}: the database did not acknowledge in time ({cause}); try again later")
        self.operation = operation
        self.cause = cause


class FenceLost(StoreError):
    """Another worker has taken the run over since: its writes count, ours do not. Stop at once."""

    def __init__(self, run_id: str, operation: str) -> None:
        super().__init__(f"run {run_id}: {operation} refused, the run is no longer held under this claim")
        self.run_id = run_id
        self.operation = operation


class StopFirst(StoreError):
    """A stop was recorded on the run that its holder does not know of yet. Nothing was written: learn of it first."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"run {run_id}: a stop was recorded first")
        self.run_id = run_id


class WrongState(StoreError):
    """The run was moved on by somebody else in between; nothing was written. `state` is where it stands now."""

    def __init__(self, run_id: str, state: str) -> None:
        super().__init__(f"run {run_id}: is {state} now; somebody else was quicker")
        self.run_id = run_id
        self.state = state


class RunExists(StoreError):
    """A run with this id was started before."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"run {run_id}: exists already")
        self.run_id = run_id


class UnreadableRun(StoreError):
    """A run's document has what this version cannot read: by a newer one, or damaged. `fields` says where."""

    def __init__(self, run_id: str, fields: Sequence[str]) -> None:
        super().__init__(f"run {run_id}: {unreadable(fields)}; use the newer version")
        self.run_id = run_id
        self.fields = tuple(fields)


def unreadable(fields: Sequence[str]) -> str:
    """What is wrong with a run that has these fields, in words without their values."""
    return f"this version cannot read its {', '.join(fields)}: a newer one has written it, or it is damaged"


class KeyIdTaken(StoreError):
    """Another data key has this id already; nothing was kept. Ids are random: draw another one."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"key {key_id}: another key has this id")
        self.key_id = key_id


class RecordTooLarge(StoreError):
    """A document would be larger than the server accepts."""

    def __init__(self, run_id: str, operation: str) -> None:
        super().__init__(f"run {run_id}: {operation} would write a document over MongoDB's 16 MiB; shrink the payload")
        self.run_id = run_id
        self.operation = operation


class UnsafeServer(StoreError):
    """The server cannot keep what the store promises; `reason` says which promise and what to change."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SchemaMismatch(StoreError):
    """Collections, validators or indexes differ from what this version needs; `nothing` where none is there at all."""

    def __init__(self, differences: Sequence[str], database: str, *, nothing: bool = False) -> None:
        if nothing:
            what = f"there are no sagas in database {database!r}; is the name right? If it is, apply the schema"
        else:
            what = f"the schema of database {database!r} is not as needed: {'; '.join(differences)}. Apply it"
        super().__init__(f"{what}: await store.schema.apply(), or python -m sagas schema apply --database {database}")
        self.differences = tuple(differences)
        self.nothing = nothing


class IllegalTransition(StoreError):
    """The state table has no such move. Never caused by input: this is a bug in the caller."""

    def __init__(self, origin: str, target: str) -> None:
        super().__init__(f"no run goes from {origin} to {target}")
        self.origin = origin
        self.target = target


class NoConnection(StoreError):
    """What should lead to a database does not; no server was asked. Never repeats the connection string."""


class NoTenantDatabase(InvalidInput):
    """No database can be named after this tenant."""

    def __init__(self, tenant: object) -> None:
        super().__init__(
            "tenant",
            f"no database can be named after {repr(tenant) if isinstance(tenant, str) else type(tenant).__name__}: it "
            "must be a text of 1 to 40 of a-z, 0-9, '_' and '-', with the databases' prefix 63 at most; the server "
            "refuses many others, and two names that differ by case alone",
        )


class StoreRefused(StoreError):
    """The server refused for good: permissions, a validator, an unknown command."""

    def __init__(self, operation: str, cause: str) -> None:
        super().__init__(f"{operation}: the database refused it ({cause})")
        self.operation = operation
        self.cause = cause
