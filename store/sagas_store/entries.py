"""Entries of the journal: what the store keeps of each outcome.

Plain, so that operators can query: kind, step, times, attempt, worker. Opaque: the payload (a context, a result, an
error's details), which the store never looks into.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

from sagas_store.states import State

__all__ = ["OF_ERRORS", "Cause", "Entry", "Kind"]


class Kind(StrEnum):
    """What an entry says happened. Stored as written here."""

    STEP_SUCCEEDED = "step_succeeded"
    """The payload is the context that the step returned."""
    STEP_RETRY_SCHEDULED = "step_retry_scheduled"
    """One try failed and another is due from `due_at` on; the payload is the error."""
    STEP_FAILED = "step_failed"
    """Failed for good: definite, or tries spent; `in_doubt` says whether its effect may have happened."""

    PROBE_SUCCEEDED = "probe_succeeded"
    """The probe gave an answer: a payload (the context) means the effect happened, none means it did not."""
    PROBE_RETRY_SCHEDULED = "probe_retry_scheduled"
    PROBE_FAILED = "probe_failed"

    COMPENSATION_SUCCEEDED = "compensation_succeeded"
    COMPENSATION_RETRY_SCHEDULED = "compensation_retry_scheduled"
    COMPENSATION_FAILED = "compensation_failed"

    INTERRUPTED = "interrupted"
    """A drain, a stop or the deadline broke the step in hand off: no outcome is known, and no try is counted."""
    ROLLBACK_BEGUN = "rollback_begun"
    """From here on no path leads forward; `cause` and `step` say why and from where."""
    STOP_REFUSED = "stop_refused"
    """A stop came after the gate; `by`, `reason` and `asked_at` say whose it was. Written by the run's holder."""

    RESUMED = "resumed"
    """An operator (`by`, `reason`) let a held run go on: tries that were spent begin anew."""
    VERDICT = "verdict"
    """An operator said whether the pivot happened: a payload (the context) means yes, none means no."""
    REQUEUED = "requeued"
    """An operator let a run go on whose payload did not open: everything else is as it was."""
    RETRIED_NOW = "retried_now"
    """An operator cut a wait short."""

    TAKEN_OVER = "taken_over"
    """A later attempt begins; `taken_from` is the state it found the run in (`running`: the lease had lapsed)."""

    UNKNOWN = "unknown"
    """Never stored: an entry that this version cannot read, by a newer one or damaged. Its run is held."""


OF_ERRORS: Final = frozenset(kind for kind in Kind if kind.endswith(("_failed", "_retry_scheduled")))
"""Kinds whose payload is an error."""


class Cause(StrEnum):
    """Why a rollback begins; each settles in its own state."""

    STEP_FAILED = "step_failed"
    STOP = "stop"
    DEADLINE = "deadline"


class Entry(NamedTuple):
    """One entry of one run's journal. `(run_id, seq)` is its key, `token` the claim it was written under."""

    run_id: str
    seq: int
    """From 1, without gaps. Appending at a seq that exists fails: that is the fence."""
    kind: Kind
    at: datetime
    """The server's clock as the worker knew it."""
    attempt: int
    worker: str
    token: str
    step: str | None = None
    try_number: int | None = None
    next: str | None = None
    """What begins next without a further write, as `action:step`; after a crash this is what may have started."""
    due_at: datetime | None = None
    in_doubt: bool = False
    cause: Cause | None = None
    taken_from: State | None = None
    by: str | None = None
    """Who asked, for what a person did."""
    reason: bytes | None = None
    """Why, in that person's words; as opaque as a payload."""
    asked_at: datetime | None = None
    """When a refused stop was asked."""
    payload: bytes | None = None
