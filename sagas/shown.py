"""Runs and journals as a person may see them: no context, and what is sealed only where it opens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sagas.errors import ErrorDetail
from sagas.keyring import Opened
from sagas.sealing import Slot
from sagas_store.entries import Kind
from sagas_store.records import RunRecord
from sagas_store.states import SETTLED, Decision, State

__all__ = ["JournalLine", "RunInfo", "RunPage"]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as a person may see it: no payload."""

    run_id: str
    saga: str
    version: int
    tenant: str | None
    key: str | None
    """The idempotency key. Where it is sealed, it is opened if that can be done; lists leave it out unless asked."""
    state: State
    phase: str | None
    """`forward`, `past_gate` (the pivot has begun) or `rolling_back`; None once it is settled, which says it all."""
    attempts: int
    created_at: datetime
    due_at: datetime | None
    """Pending: from when a worker may take it. Running: when its lease ends. Held and settled: None."""
    settled_at: datetime | None
    gate_passed_at: datetime | None
    worker: str | None
    """Who holds it, or held it last."""
    held_reason: str | None
    held_since: datetime | None
    stop: Decision | None
    """What was decided of a stop: `cancelled`, `will_be_undone`, `refused`; None where none was asked."""
    stop_by: str | None
    stop_at: datetime | None
    deadline: datetime | None
    overdue: bool
    """The deadline passed after the gate: the run goes on, late."""
    restarted_from: str | None
    blocked_since: datetime | None = None
    """Since when its payloads do not open, for runs that are on hold or quarantined because of it."""
    blocked_by: str | None = None
    """What kind of failure it is: `KeyUnavailable`, `KeyDenied`, `KeyLost`, `Tampered`."""
    blocked_why: str | None = None
    blocked_key: str | None = None
    """The id of the key that does not open it."""
    blocked_count: int = 0
    """How many claims found the key lost."""
    stop_reason: str | None = None
    """Why, in the words of whoever asked for the stop; as `key`, and None where it could not be sealed then."""
    started_by: str | None = None
    """Who started it anew, for a run that was restarted from another."""
    started_reason: str | None = None
    """Why, in that person's words; as `key`."""
    unopened: str | None = None
    """Why the key or a reason that is there, and was asked for, cannot be shown."""

    @classmethod
    def of(cls, record: RunRecord, opened: Mapping[Slot, Opened] | None = None) -> RunInfo:
        """From the store's record, and what was opened of the words stored with it."""
        words = opened or {}
        said = {slot: one.text for slot, one in words.items()}
        blocked = record.blocked if record.state in (State.PENDING, State.QUARANTINED) else None
        return cls(
            run_id=record.run_id,
            saga=record.saga,
            version=record.version,
            tenant=record.tenant,
            key=record.key if record.key is not None else said.get(Slot.KEY),
            state=record.state,
            phase=str(record.phase) if record.state not in SETTLED else None,
            attempts=record.attempts,
            created_at=record.created_at,
            due_at=record.due_at,
            settled_at=record.settled_at,
            gate_passed_at=record.gate_passed_at,
            worker=record.claim.worker if record.claim else None,
            held_reason=record.held.reason if record.held else None,
            held_since=record.held.since if record.held else None,
            stop=record.stop.decision if record.stop else None,
            stop_by=record.stop.by if record.stop else None,
            stop_at=record.stop.asked_at if record.stop else None,
            deadline=record.deadline,
            overdue=record.overdue,
            restarted_from=record.restarted_from,
            blocked_since=blocked.since if blocked else None,
            blocked_by=blocked.failure if blocked else None,
            blocked_why=blocked.why if blocked else None,
            blocked_key=blocked.key_id if blocked else None,
            blocked_count=blocked.count if blocked else 0,
            stop_reason=said.get(Slot.STOP),
            started_by=record.started_by,
            started_reason=said.get(Slot.RESTART),
            unopened="; ".join(one.unopened for one in words.values() if one.unopened) or None,
        )


@dataclass(frozen=True, slots=True)
class RunPage:
    """Some runs, newest first."""

    runs: list[RunInfo]
    next: str | None
    """Pass it as `after` to get the next page; None on the last one."""


@dataclass(frozen=True, slots=True)
class JournalLine:
    """One entry of a run's journal, as a person reads it."""

    seq: int
    at: datetime
    kind: Kind
    step: str | None
    try_number: int | None
    attempt: int
    worker: str
    next: str | None
    due_at: datetime | None
    in_doubt: bool
    error: ErrorDetail | None
    happened: bool | None
    """For what a probe found or an operator said of a step: whether its effect happened."""
    by: str | None
    """Who asked, for what a person did: a stop, a resume, a verdict."""
    reason: str | None
    unopened: str | None = None
    """Why an error or a reason that is there cannot be shown: its key is away or lost, or it was tampered with."""
