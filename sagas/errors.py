"""What can go wrong, sorted by what the caller can do about it.

Whatever is meant for a caller is a SagaError, wrong options included; anything else is a fault of ours.

    SagaError
    ├── DefinitionError        your saga is defined wrongly: fix the code, the step and the fix are named
    ├── InvalidInput           an argument or an option is wrong: the field and the fix are named
    │   └── NoTenantDatabase   no database can be named after this tenant: name it otherwise
    ├── StartRefused           this start is not possible as asked
    │   ├── KeyConflict        the key was used before, with another input
    │   └── PayloadTooLarge    the context is over the limit
    ├── RunNotFound            no run has this id, or this key
    ├── OperatorRefused        an operator's verb does not apply to this run now; the reason is named
    ├── KeyRefused             an operator's verb does not apply to this key now; the reason is named
    ├── JournalMisfit          a journal does not fit its definition: its run is held, with the difference named
    ├── LeaseLapsed            inside a worker: a run's lease may be over, so it writes nothing more (sagas.lease)
    ├── Unreadable             stored bytes are not what they should be
    ├── CannotOpen             a sealed payload does not open now; `failure` says what that means for its run
    │   ├── KeyUnavailable     transient: the key service is throttled or away, try again later
    │   ├── KeyDenied          the key service refuses us: give this process the right to use the master key
    │   ├── KeyLost            destroyed, disabled, unknown: bring the key back, if it can be
    │   ├── Tampered           the key is there, and these bytes were not sealed with it for this place
    │   └── NoKeyring          this process was given no keyring
    ├── ResultTimeout          the run has not come to rest within the timeout; it goes on
    ├── ClientClosed           the client was closed while a result was waited for; the run goes on
    ├── RunDidNotComplete      the run came to rest otherwise than completed
    │   ├── RunRolledBack      failed, cancelled or timed out before its pivot; what can be undone is
    │   ├── RunFailed          a plain durable function raised for good
    │   └── RunHeld            it waits for an operator
    └── StoreError             about the database, see sagas_store.errors (StoreUnavailable, UnreadableRun ...)

Raised by the author of a step, to say what the engine cannot know:

    NonRetryable               it did not happen, and trying again is pointless
    Retryable                  it did not happen (unless in_doubt=True), try again, at the earliest after `retry_after`
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, ClassVar

from sagas_store.errors import (
    FenceLost,
    InvalidInput,
    NoTenantDatabase,
    SagaError,
    SchemaMismatch,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    UnreadableRun,
    UnsafeServer,
)
from sagas_store.numbers import DURATION_MAX
from sagas_store.states import State

__all__ = [
    "CannotOpen",
    "ClientClosed",
    "DefinitionError",
    "ErrorDetail",
    "FenceLost",
    "InvalidInput",
    "JournalMisfit",
    "KeyConflict",
    "KeyDenied",
    "KeyLost",
    "KeyRefused",
    "KeyUnavailable",
    "NoKeyring",
    "NoTenantDatabase",
    "NonRetryable",
    "OpenFailure",
    "OperatorRefused",
    "PayloadTooLarge",
    "ResultTimeout",
    "Retryable",
    "RunDidNotComplete",
    "RunFailed",
    "RunHeld",
    "RunNotFound",
    "RunRolledBack",
    "SagaError",
    "SchemaMismatch",
    "StartRefused",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "Tampered",
    "Unreadable",
    "UnreadableRun",
    "UnsafeServer",
    "over_limit",
    "pause_of",
]


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """What a step raised, as its journal keeps it."""

    type: str
    message: str
    traceback: str = ""


class DefinitionError(SagaError):
    """A saga is defined wrongly. Raised when it is built, so before anything runs."""

    def __init__(self, saga: str, step: str | None, problem: str) -> None:
        super().__init__(f"saga {saga!r}" + (f", step {step!r}" if step else "") + f": {problem}")
        self.saga = saga
        self.step = step


class StartRefused(SagaError):
    """A run cannot be started as asked; nothing was stored."""


class KeyConflict(StartRefused):
    """A run of this saga was started with the same key and another input. The stored one stands."""

    def __init__(self, saga: str, key: str, run_id: str) -> None:
        super().__init__(
            # Without the key: it may be an e-mail address, and errors end up in logs.
            f"saga {saga!r}: this key belongs to run {run_id}, which was started with another input; "
            "use a new key for a new order, or the same input to get that run"
        )
        self.saga = saga
        self.key = key
        self.run_id = run_id


def over_limit(size_bytes: int, limit_bytes: int) -> str:
    """How large something is that is larger than it may be, and what to do."""
    return (
        f"{size_bytes:,} bytes, the limit is {limit_bytes:,}; keep large data elsewhere and put its reference into "
        "the context"
    )


class PayloadTooLarge(StartRefused):
    """A context is larger than the limit; `size_bytes` and `limit_bytes` are measured as stored."""

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{what} is {over_limit(size_bytes, limit_bytes)}")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class RunNotFound(SagaError):
    """No run has this id. Or, looked up by its `key`, that key: `run_id` is the id it would have, None if not known."""

    def __init__(self, run_id: str | None, sought: str | None = None, *, key: str | None = None) -> None:
        """`sought` says what was asked for, where it was not the id; as in KeyConflict without the key."""
        super().__init__(f"{sought or f'run {run_id}'}: not found")
        self.run_id = run_id
        self.key = key


class OperatorRefused(SagaError):
    """The verb does not apply to this run as it stands: `why` says so. Nothing was changed."""

    def __init__(self, run_id: str, state: State, why: str) -> None:
        super().__init__(f"run {run_id} is {state}: {why}")
        self.run_id = run_id
        self.state = state
        self.why = why


class KeyRefused(SagaError):
    """The verb does not apply to this key as it stands: `why` says so. Nothing was changed."""

    def __init__(self, tenant: str | None, key_id: str, why: str) -> None:
        super().__init__(
            f"key {key_id} of " + (f"tenant {tenant!r}" if tenant is not None else "no tenant") + f": {why}"
        )
        self.tenant = tenant
        self.key_id = key_id
        self.why = why


class Unreadable(SagaError):
    """Stored bytes cannot be read as what they should be. No part of them is in the message."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"{what}: {problem}")
        self.what = what


class OpenFailure(StrEnum):
    """What it means for a run that one of its payloads does not open."""

    TRANSIENT = "transient"
    """Nothing is known of the key: the attempt is given back, and nothing is counted."""
    DENIED = "denied"
    """We may not use the key: transient for a bounded time, then lost."""
    LOST = "lost"
    """The key is gone, or the bytes are not its: counted, and in the end the run is quarantined."""


class CannotOpen(SagaError):
    """A sealed payload, or its key, does not open now. `why` says so without a byte of either."""

    failure: ClassVar[OpenFailure]
    fix: ClassVar[str] = ""
    """What to do about it, where that is the same each time; said beside `why`."""

    def __init__(self, tenant: str | None, key_id: str | None, why: str) -> None:
        super().__init__(
            (f"tenant {tenant!r}" if tenant is not None else "no tenant")
            + (f", key {key_id}" if key_id is not None else "")
            + f": {why}{self.fix}"
        )
        self.tenant = tenant
        self.key_id = key_id
        """None where not even a key is known: the tenant has none."""
        self.why = why


class KeyUnavailable(CannotOpen):
    """The key cannot be had for the moment: its service is throttled, unreachable or failing. Try again later."""

    failure = OpenFailure.TRANSIENT


class KeyDenied(CannotOpen):
    """The key service refuses this process. Check its credentials and the master key's policy."""

    failure = OpenFailure.DENIED


class KeyLost(CannotOpen):
    """The key is destroyed, disabled, or not known. Nothing of this process brings it back."""

    failure = OpenFailure.LOST


class Tampered(CannotOpen):
    """The key is at hand and authentication failed: the bytes were altered, cut, or moved here from elsewhere.

    Either somebody or something changed the database behind our back, or a restore mixed two states of it. The key
    itself is in order, so bringing a key back is not what helps.
    """

    failure = OpenFailure.LOST


class NoKeyring(CannotOpen):
    """The payload is sealed and this process has no keyring. Another may have one: nothing is known of the key."""

    failure = OpenFailure.TRANSIENT
    fix = "; give it one: MongoStore(database, keyring=...), or on the command line --master-keys or --keyring"


class JournalMisfit(SagaError):
    """A journal does not fit its definition; the difference is named. Such a run is held, never run."""


class ResultTimeout(SagaError, TimeoutError):
    """The run has not come to rest within the caller's timeout. It goes on; ask again."""

    def __init__(self, run_id: str, timeout: timedelta, state: State) -> None:
        super().__init__(f"run {run_id}: still {state} after {timeout.total_seconds():g} s; it goes on, ask again")
        self.run_id = run_id
        self.state = state


class ClientClosed(SagaError):
    """The client was closed while a result was waited for. The run goes on; ask another client."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"run {run_id}: the client is closed and waits no longer; the run goes on")
        self.run_id = run_id


class RunDidNotComplete(SagaError):
    """The run came to rest otherwise than completed: `state` says how, `step` where, `error` what that step raised.

    What the step's exception said is in `error` alone: it may quote a payload, and messages end up in logs.
    """

    def __init__(
        self, run_id: str, state: State, reason: str, *, step: str | None = None, error: ErrorDetail | None = None
    ) -> None:
        super().__init__(f"run {run_id}: {state}: {reason}")
        self.run_id = run_id
        self.state = state
        self.step = step
        self.error = error


class RunRolledBack(RunDidNotComplete):
    """The run was undone (`compensated`, `cancelled`, `timed_out`): every compensation is in its journal.

    A plain durable function that was stopped or timed out ends so, too: no step of it has a compensation, and what was
    done stays.
    """


class RunFailed(RunDidNotComplete):
    """A plain durable function (no step has a compensation) raised for good; nothing was undone."""


class RunHeld(RunDidNotComplete):
    """The run still owes work and waits for an operator; `since` says from when. It may yet complete."""

    def __init__(self, run_id: str, state: State, reason: str, since: datetime) -> None:
        super().__init__(run_id, state, f"{reason} (since {since:%Y-%m-%d %H:%M:%S} UTC); an operator must act")
        self.since = since


class NonRetryable(Exception):
    """Raise it from a step: its effect did not happen, and no further try will change that."""


def pause_of(asked: Any) -> timedelta | None:
    """A pause that was asked for, in seconds, as a text of them, or as a timedelta; None where it is none of these.

    Ten years at most: what is added to the present is to be a date still.
    """
    try:
        if isinstance(asked, timedelta):
            return min(asked, DURATION_MAX)
        return timedelta(seconds=min(float(asked), DURATION_MAX.total_seconds()))
    except Exception:  # not a number, or not even a thing that can be asked for one
        return None


class Retryable(Exception):
    """Raise it from a step: try again, after `retry_after` at the earliest, else by the policy.

    `retry_after` is a timedelta or seconds, also as text, as HTTP's Retry-After has them. Anything else counts as not
    given (that header may be a date): an odd answer of somebody else's must not decide what becomes of a run.

    It means that the effect did not happen. Where that is not certain, pass `in_doubt=True`.
    """

    retry_after: timedelta | None = None  # also for subclasses that do not call this class's __init__
    in_doubt: bool = False

    def __init__(
        self, message: str = "", *, retry_after: float | str | timedelta | None = None, in_doubt: bool = False
    ) -> None:
        super().__init__(message)
        self.retry_after = pause_of(retry_after)
        self.in_doubt = in_doubt
